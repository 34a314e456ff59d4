"""The validate stage: checks the tables that `ingest` wrote before any training.

A failed `critical` rule stops the run; failed `warning` and `info` rules are reported and logged. Drift compares the
distributions of events per user and per item with an accepted baseline.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from seqrec import artifacts
from seqrec.config import ValidateConfig
from seqrec.data.drift import stability_index

if TYPE_CHECKING:
    from seqrec.data.expectations import Check, Log, Totals

logger = logging.getLogger(__name__)

EXAMPLES = 5


class ValidationFailed(ValueError):  # noqa: N818 - says what happened to the stage
    """Critical rules failed; the message names them with offending values and the setting to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts over the whole log."""

    rows: int
    distinct_times: int
    first: int | None
    last: int | None
    events: Mapping[str, np.ndarray]  # events per user_id and per item_id, ascending
    repeats: int  # number of rows that repeat user, item and time
    examples: Sequence[str]


def validate(*, dataset: str, data: Path, report: Path, baseline: Path, config: ValidateConfig) -> dict[str, float]:
    """Check the tables in `data`; write the verdict to `report` (JSON) and to an HTML file beside it.

    Args:
        dataset: name of the dataset in `baseline`.
        data: folder with interactions.parquet, items.parquet and source.json, as ingest writes them.
        report: the JSON file to write.
        baseline: JSON file of accepted histograms; without an entry for `dataset`, drift is not measured.
        config: the limits.

    Returns:
        Counts and shares of the log, and the number of rules that failed without stopping.

    Raises:
        ValidationFailed: a critical rule failed; both reports are still written.
    """
    from seqrec.data import expectations  # imported here, because Great Expectations takes seconds

    paths = data / artifacts.INTERACTIONS, data / artifacts.ITEMS
    results = expectations.run(expectations.schema_suites(*(artifacts.open_table(path).schema_arrow for path in paths)))
    statistics: dict[str, float] = {}
    if all(result.success for result in results):
        catalogue = pl.read_parquet(paths[1], columns=["item_id", "title"])
        log, counted = (_on_spark if config.engine == "spark" else _in_memory)(paths[0])
        totals = _totals(counted, log.items, catalogue, _read_baseline(baseline).get(dataset))
        suites = expectations.content_suites(log, catalogue, totals, _reference(data), config)
        results += expectations.run(suites)
        statistics = _statistics(counted, totals)
    checks = expectations.to_checks(results)
    failed = [check for check in checks if not check.success]
    critical = [check for check in failed if check.severity == "critical"]
    verdict = {
        "success": not critical,
        "dataset": dataset,
        "input_sha256": artifacts.sha256(paths[0]),
        "checks": [dataclasses.asdict(check) for check in checks],
        "statistics": statistics,
    }
    artifacts.write_json(report, verdict)
    artifacts.write_text(report.with_suffix(".html"), expectations.to_page(dataset, checks))
    for check in failed:
        if check.severity != "critical":
            logger.warning("%s: %s", dataset, _describe(check))
    if critical:
        lines = "\n".join(f"- {_describe(check)}" for check in critical)
        raise ValidationFailed(f"{dataset}: critical rules failed, see {report.with_suffix('.html')}\n{lines}")
    return {**statistics, "failed_rules": float(len(failed))}


def accept_baseline(*, dataset: str, data: Path, baseline: Path) -> None:
    """Accept the interactions in `data` as the baseline of `dataset`, with which later ones are compared.

    Args:
        dataset: name of the entry.
        data: folder with interactions.parquet.
        baseline: JSON file of accepted histograms; entries of other datasets are kept.

    Raises:
        ValueError: there are no interactions.
    """
    events = _read_events(data / artifacts.INTERACTIONS)
    if events.is_empty():
        raise ValueError(f"{data / artifacts.INTERACTIONS} has no rows: nothing to accept as baseline of {dataset}")
    entries = _read_baseline(baseline)
    entries[dataset] = {column: histogram(_event_counts(events, column)) for column in ("item_id", "user_id")}
    artifacts.write_json(baseline, dict(sorted(entries.items())))


def histogram(counts: np.ndarray) -> dict[str, list[float]]:
    """Return `edges` 1, 2, 4, ... and the `shares` of the positive `counts` in these bins; the last one is open."""
    edges = [2**power for power in range(int(counts.max()).bit_length())]
    return {"edges": edges, "shares": [round(share, 6) for share in _shares(counts, edges).tolist()]}


def drift(entry: Mapping[str, Sequence[float]], counts: np.ndarray) -> float:
    """Return the population stability index of `counts` against a `histogram`."""
    return stability_index(np.asarray(entry["shares"]), _shares(counts, entry["edges"]))


def _shares(counts: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    return np.histogram(counts, bins=[*edges, np.inf])[0] / len(counts)


def _read_events(path: Path) -> pl.DataFrame:
    artifacts.open_table(path)  # polars' own error is no ValueError
    # Categorical ids take 4 bytes per row, whatever their length.
    ids = pl.col("user_id", "item_id").cast(pl.Categorical)
    return pl.scan_parquet(path).with_columns(ids).collect(engine="streaming")


def _read_baseline(path: Path) -> dict[str, Any]:
    return artifacts.read_json(path) if path.is_file() else {}


def _reference(data: Path) -> dict[str, int]:
    card = data / artifacts.SOURCE_CARD
    known = (artifacts.read_json(card) if card.is_file() else {}).get("reference") or {}
    return {name: count for name, count in known.items() if count is not None}


def _event_counts(events: pl.DataFrame, column: str) -> np.ndarray:
    return _ascending(events[column].drop_nulls().value_counts()["count"])


def _in_memory(path: Path) -> tuple[Log, Counted]:
    from seqrec.data.expectations import Log

    events = _read_events(path)
    repeated = _repeated(events)
    times = events["timestamp"].drop_nulls().sort().to_numpy()  # a set of distinct times would take more memory
    counted = Counted(
        rows=events.height,
        distinct_times=int(np.count_nonzero(np.diff(times))) + bool(len(times)),
        first=int(times[0]) if len(times) else None,
        last=int(times[-1]) if len(times) else None,
        events={column: _event_counts(events, column) for column in ("user_id", "item_id")},
        repeats=repeated.height - repeated.drop("row").n_unique() if repeated.height else 0,
        examples=_shown(repeated.head(EXAMPLES)),
    )
    del times
    return Log.of(events), counted


def _on_spark(path: Path) -> tuple[Log, Counted]:
    import narwhals as nw

    from seqrec.data.expectations import Log
    from seqrec.data.table_engines import Spark

    engine = Spark()
    events = engine.read(path)
    key, time = ["user_id", "item_id", "timestamp"], nw.col("timestamp")
    counts = {
        column: engine.table(events.group_by(column).agg(nw.len().alias("events"))).to_native()
        for column in ("user_id", "item_id")
    }
    ratings = engine.table(events.select("rating").unique()).to_native()["rating"]
    log = Log(
        users=counts["user_id"]["user_id"],
        items=counts["item_id"]["item_id"],
        ratings=ratings,
        times=events.select("timestamp", "row").to_native(),
    )
    repeated = events.group_by(*key).agg(nw.len().alias("events")).filter(nw.col("events") > 1)
    first = events.join(repeated, on=key, how="semi").select(*key, "row").sort("row").head(EXAMPLES)
    facts = {"times": time.n_unique(), "first": time.min(), "last": time.max()}
    row = engine.table(events.select(nw.len().alias("rows"), *(value.alias(name) for name, value in facts.items())))
    repeats = engine.table(repeated.select((nw.col("events") - 1).sum().alias("repeats")))["repeats"].item()
    return log, Counted(
        rows=row["rows"].item(),
        distinct_times=row["times"].item(),
        first=row["first"].item(),
        last=row["last"].item(),
        events={name: _ascending(table.drop_nulls(name)["events"]) for name, table in counts.items()},
        repeats=repeats or 0,
        examples=_shown(engine.table(first).to_native()),
    )


def _shown(repeated: pl.DataFrame) -> list[str]:
    return [f"{user}, {item}, {time} (row {row})" for user, item, time, row in repeated.iter_rows()]


def _ascending(counts: pl.Series) -> np.ndarray:
    return counts.sort().to_numpy()


def _totals(
    counted: Counted, items: pl.Series, catalogue: pl.DataFrame, histograms: Mapping[str, Any] | None
) -> Totals:
    from seqrec.data.expectations import Totals

    seen = items.drop_nulls().cast(pl.String)
    unknown = seen.filter(~seen.is_in(catalogue["item_id"].drop_nulls().implode())).sort()
    measured = histograms if histograms and len(seen) else None
    return Totals(
        rows=counted.rows,
        users=len(counted.events["user_id"]),
        items=len(seen),
        distinct_times=counted.distinct_times,
        duplicate_share=counted.repeats / max(counted.rows, 1),
        duplicates=list(counted.examples),
        unknown_items=len(unknown),
        unknown=unknown.head(EXAMPLES).to_list(),
        user_drift=drift(measured["user_id"], counted.events["user_id"]) if measured else None,
        item_drift=drift(measured["item_id"], counted.events["item_id"]) if measured else None,
    )


def _repeated(events: pl.DataFrame) -> pl.DataFrame:
    key = ["user_id", "item_id", "timestamp"]
    # Only rows with equal hashes are compared; comparing all rows takes several times the time and memory.
    hashes = events.select(pl.col(key).to_physical()).hash_rows()
    ascending = np.sort(hashes.to_numpy())
    again = pl.Series(ascending[1:][ascending[1:] == ascending[:-1]]).unique()
    suspects = events.select(*key, "row").filter(hashes.is_in(again.implode()))
    return suspects.filter(suspects.select(key).is_duplicated()).sort("row")


def _statistics(counted: Counted, totals: Totals) -> dict[str, float]:
    values: dict[str, Any] = {
        "rows": totals.rows,
        "users": totals.users,
        "items": totals.items,
        "distinct_times": totals.distinct_times,
        "duplicate_share": totals.duplicate_share,
        "unknown_items": totals.unknown_items,
        "user_drift": totals.user_drift,
        "item_drift": totals.item_drift,
        "first_timestamp": counted.first,
        "last_timestamp": counted.last,
    }
    for column, counts in counted.events.items():
        if len(counts):
            name = f"events_per_{column.removesuffix('_id')}"
            values |= {f"{name}_median": float(np.median(counts)), f"{name}_max": int(counts[-1])}
    return {name: round(float(value), 6) for name, value in values.items() if value is not None}


def _describe(check: Check) -> str:
    where = f"{check.table}.{check.column}" if check.column else check.table
    examples = f", e.g. {', '.join(map(repr, check.examples))}" if check.examples else ""
    observed = check.observed if " " in check.observed else f"found {check.observed}"  # a sentence, or a number
    return f"{where} ({check.severity}): {check.rule}; {observed}{examples}; {check.advice}"
