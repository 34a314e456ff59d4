"""The k-core filter: keeps users and items with enough events among the events that are kept."""

from __future__ import annotations

from collections.abc import Callable

import narwhals as nw

from seqrec.data.splits import Frame, size


def k_core(events: Frame, user_events: int, item_events: int, keep: Callable[[Frame], Frame] = lambda f: f) -> Frame:
    """Repeatedly drop users and items with too few events, until all that remain have enough.

    Each round counts the events of the users and items that remain; `keep` materialises these small tables.

    >>> import polars as pl
    >>> log = nw.from_native(pl.LazyFrame({"user": [1, 1, 2, 2, 3], "item": [7, 8, 7, 8, 7]}))
    >>> sorted(k_core(log, 2, 2).collect()["user"].to_list())
    [1, 1, 2, 2]
    """
    if user_events == item_events == 1:
        return events
    kept, sizes = events, (-1, -1)
    while True:
        items = keep(_frequent(kept, "item", item_events))
        users = keep(_frequent(kept.join(items, on="item", how="semi"), "user", user_events))
        kept = events.join(users, on="user", how="semi").join(items, on="item", how="semi")
        before, sizes = sizes, (size(users), size(items))
        if sizes == before:
            return kept


def _frequent(events: Frame, column: str, least: int) -> Frame:
    counted = events.group_by(column).agg(nw.len().alias("events"))
    return counted.filter(nw.col("events") >= least).select(column)
