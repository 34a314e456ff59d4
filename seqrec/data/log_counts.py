"""What the rules of validation need to know about all events of a log, counted in memory or on Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl
from numpy.typing import NDArray

from seqrec.artifacts import open_table

EXAMPLES = 5  # offending values kept for each rule
KEY = ("user_id", "item_id", "timestamp")  # events that agree in these repeat each other


@dataclass(frozen=True, kw_only=True)
class LogCounts:
    """The distinct values and the totals of a log."""

    users: pl.Series  # distinct ids
    items: pl.Series
    ratings: pl.Series  # distinct ratings
    times: Any  # timestamp and row of every event; a frame of pandas or Spark
    rows: int
    distinct_times: int
    first: int | None  # earliest and latest timestamp
    last: int | None
    events: Mapping[str, NDArray[np.integer]]  # events per user_id and per item_id, ascending
    repeats: int  # number of rows that repeat user, item and time
    repeated: Sequence[str]  # examples of these


def read_events(path: Path) -> pl.DataFrame:
    """Return the interactions table with categorical ids, which take 4 bytes a row, whatever their length."""
    open_table(path)  # polars' own error is not a ValueError
    ids = pl.col("user_id", "item_id").cast(pl.Categorical)
    return pl.scan_parquet(path, glob=False).with_columns(ids).collect(engine="streaming")


def events_per(events: pl.DataFrame, column: str) -> NDArray[np.integer]:
    """Return the number of events of each id, ascending."""
    return events[column].drop_nulls().value_counts()["count"].sort().to_numpy()


def in_memory(events: pl.DataFrame) -> LogCounts:
    """Count an interactions table; ids may be categorical."""
    import pandas as pd

    repeated = _repeated(events)
    times = events["timestamp"].drop_nulls().sort().to_numpy()  # a set of distinct times would take more memory
    users, items, ratings = (events[name].unique() for name in ("user_id", "item_id", "rating"))
    return LogCounts(
        users=users,
        items=items,
        ratings=ratings,
        times=pd.DataFrame({name: events[name].to_numpy() for name in ("timestamp", "row")}, copy=False),
        rows=events.height,
        distinct_times=int(np.count_nonzero(np.diff(times))) + bool(len(times)),
        first=int(times[0]) if len(times) else None,
        last=int(times[-1]) if len(times) else None,
        events={column: events_per(events, column) for column in ("user_id", "item_id")},
        repeats=repeated.height - repeated.drop("row").n_unique() if repeated.height else 0,
        repeated=_shown(repeated.head(EXAMPLES)),
    )


def _repeated(events: pl.DataFrame) -> pl.DataFrame:
    # Only rows with equal hashes are compared; comparing all rows takes several times the time and memory.
    hashes = events.select(pl.col(KEY).to_physical()).hash_rows()
    ascending = np.sort(hashes.to_numpy())
    again = pl.Series(ascending[1:][ascending[1:] == ascending[:-1]]).unique()
    suspects = events.select(*KEY, "row").filter(hashes.is_in(again.implode()))
    return suspects.filter(suspects.select(KEY).is_duplicated()).sort("row")


def _shown(repeated: pl.DataFrame) -> list[str]:
    return [f"{user}, {item}, {time} (row {row})" for user, item, time, row in repeated.iter_rows()]


def on_spark(path: Path) -> LogCounts:
    """Count an interactions table that may be larger than memory."""
    from seqrec.data.table_engines import Spark

    engine, time = Spark(), nw.col("timestamp")
    events = engine.read(path)
    counts = {
        column: engine.table(events.group_by(column).agg(nw.len().alias("events"))).to_native()
        for column in ("user_id", "item_id")
    }
    repeated = events.group_by(*KEY).agg(nw.len().alias("events")).filter(nw.col("events") > 1)
    first = events.join(repeated, on=list(KEY), how="semi").select(*KEY, "row").sort("row").head(EXAMPLES)
    facts = {"rows": nw.len(), "times": time.n_unique(), "first": time.min(), "last": time.max()}
    row = engine.table(events.select(*(value.alias(name) for name, value in facts.items())))
    repeats = engine.table(repeated.select((nw.col("events") - 1).sum().alias("repeats")))["repeats"].item()
    return LogCounts(
        users=counts["user_id"]["user_id"],
        items=counts["item_id"]["item_id"],
        ratings=engine.table(events.select("rating").unique()).to_native()["rating"],
        times=events.select("timestamp", "row").to_native(),
        rows=row["rows"].item(),
        distinct_times=row["times"].item() or 0,  # null of no rows
        first=row["first"].item(),
        last=row["last"].item(),
        events={name: table.drop_nulls(name)["events"].sort().to_numpy() for name, table in counts.items()},
        repeats=repeats or 0,
        repeated=_shown(engine.table(first).to_native()),
    )
