"""Filters, numbering and splits of the interactions table, written once in Narwhals for every table engine.

No function looks at an item's identity to order events: equal timestamps stay in source order.
"""

from __future__ import annotations

from typing import Any

import narwhals as nw
import numpy as np
from numpy.typing import NDArray

from seqrec.config import PrepareConfig

Frame = nw.DataFrame[Any]
IntArray = NDArray[np.integer]
NEGATIVES = 100  # rivals of a target under LOO-101


def deduplicate(events: Frame, rule: str) -> Frame:
    """Keep the first row, in source order, of equal events.

    Args:
        events: user_id, item_id, timestamp, row, ...
        rule: exact (same user, item, time), first_pair (same user, item: the earliest) or none.
    """
    if rule == "none":
        return events
    key = ["user_id", "item_id", "timestamp"] if rule == "exact" else ["user_id", "item_id"]
    return events.sort("timestamp", "row").unique(key, keep="first", maintain_order=True)


def k_core(events: Frame, user_events: int, item_events: int) -> Frame:
    """Drop users and items with too few events, again and again, until every one left has enough.

    >>> import polars as pl
    >>> log = nw.from_native(pl.DataFrame({"user_id": ["a", "a", "b", "b", "c"], "item_id": ["x", "y", "x", "y", "x"]}))
    >>> sorted(k_core(log, 2, 2)["user_id"].to_list())
    ['a', 'a', 'b', 'b']
    """
    while True:
        before = len(events)
        for column, least in (("item_id", item_events), ("user_id", user_events)):
            events = events.filter(nw.len().over(column) >= least)
        if len(events) == before:
            return events


def sample_users(events: Frame, number: int, seed: int) -> Frame:
    """Keep the events of `number` random users; 0 keeps all. The draw depends on the seed and the set of users."""
    users = np.sort(events["user_id"].unique().to_numpy())
    if number == 0 or number >= len(users):
        return events
    chosen = np.random.default_rng(seed).choice(users, size=number, replace=False)
    return events.filter(nw.col("user_id").is_in(chosen.tolist()))


def number(events: Frame, column: str, name: str) -> Frame:
    """Return a table (name, column): ids 1, 2, ... in order of first appearance in the source."""
    first = events.group_by(column).agg(nw.col("row").min()).sort("row")
    return first.with_row_index(name).select(nw.col(name).cast(nw.Int32) + 1, column)


def order(events: Frame) -> Frame:
    """Sort by user, time and source row."""
    return events.sort("user", "timestamp", "row")


def draw_negatives(item: IntArray, events: IntArray, num_items: int, number: int, seed: int) -> IntArray:
    """Return (U, number): distinct items that a user never interacted with, uniformly drawn.

    Args:
        item: (E,) of every event, users one after the other.
        events: (U,) number of events of each user.
        num_items: items are 1 to this.
        number: items per user.
        seed: of the draw.

    Raises:
        ValueError: a user has fewer unseen items than that.
    """
    user = np.repeat(np.arange(len(events)), events)
    seen = np.unique(user * (num_items + 1) + item)
    unseen = num_items - np.bincount(seen // (num_items + 1), minlength=len(events))
    if (unseen < number).any():
        raise ValueError(
            f"prepare.protocol LOO-101: {(unseen < number).sum()} users have fewer than {number} unseen items among "
            f"{num_items}: use LOO-full, or a larger catalogue"
        )
    generator = np.random.default_rng(seed)
    first = np.arange(len(events))[:, None] * (num_items + 1)
    drawn = np.zeros((len(events), number), dtype=np.int64)
    rows, rejected = np.arange(len(events)), np.ones(drawn.shape, dtype=bool)
    while len(rows):
        part = drawn[rows]
        part[rejected] = generator.integers(1, num_items + 1, size=int(rejected.sum()))
        part.sort(axis=1)
        drawn[rows] = part
        rejected = np.isin(part + first[rows], seen)
        rejected[:, 1:] |= part[:, 1:] == part[:, :-1]
        rows, rejected = rows[rejected.any(axis=1)], rejected[rejected.any(axis=1)]
    return drawn


def ends(events: Frame, config: PrepareConfig) -> tuple[Frame, dict[str, Any]]:
    """Return (user, events, train_end, valid_end) per user, and the facts of the split for its card.

    Positions 0 to train_end are training, to valid_end validation, the rest test; each validation or test event is a
    case whose input is everything before it. LOO-101 is LOO-full with negatives drawn besides. Both, and RATIO-full,
    leak the future of other users into training, as in the papers; temporal does not.
    """
    if config.protocol in ("LOO-full", "LOO-101"):
        return _leave_one_out(events, config)
    if config.protocol == "RATIO-full":
        return _ratio(events, config)
    return _temporal(events, config)


def _leave_one_out(events: Frame, config: PrepareConfig) -> tuple[Frame, dict[str, Any]]:
    """The last event is test and the one before it validation; users with fewer than three events only train.

    With `val_users`, the other users train on the event before the last.
    """
    users = events.group_by("user").agg(nw.len().alias("events")).sort("user")
    enough = nw.col("events") >= 3
    validated = nw.lit(True)
    if config.val_users:
        able = users.filter(enough)["user"].to_numpy()
        drawn = np.random.default_rng(config.seed).choice(able, size=min(config.val_users, len(able)), replace=False)
        validated = nw.col("user").is_in(drawn.tolist())
    valid_end = nw.when(enough).then(nw.col("events") - 1).otherwise(nw.col("events"))
    train_end = nw.when(enough & validated).then(nw.col("events") - 2).otherwise(valid_end)
    table = users.with_columns(train_end.alias("train_end"), valid_end.alias("valid_end"))
    return table, {"rule": "last event test, the one before validation"}


def _ratio(events: Frame, config: PrepareConfig) -> tuple[Frame, dict[str, Any]]:
    """The last `test_share` of each user's events is test, the `valid_share` before it validation, rounded down."""
    users = events.group_by("user").agg(nw.len().alias("events")).sort("user")
    number = users["events"].to_numpy()
    test = np.floor(number * config.test_share + 1e-9).astype(np.int64)
    valid = np.floor(number * config.valid_share + 1e-9).astype(np.int64)
    bounds = {"train_end": number - test - valid, "valid_end": number - test}
    backend = nw.get_native_namespace(users)
    columns = [nw.new_series(name, values.tolist(), nw.Int64, backend=backend) for name, values in bounds.items()]
    return users.with_columns(*columns), {"rule": "the last shares of each user's events"}


def _temporal(events: Frame, config: PrepareConfig) -> tuple[Frame, dict[str, Any]]:
    """Two moments divide everybody's events; no training event is at or after the first one."""
    times = np.sort(events["timestamp"].to_numpy())
    share = 1 - config.test_share - config.valid_share
    valid_cut, test_cut = (int(times[int(len(times) * at)]) for at in (share, 1 - config.test_share))
    if not times[0] < valid_cut < test_cut:
        raise ValueError(
            "prepare.protocol temporal: the timestamps do not divide into three periods; "
            "change prepare.valid_share and prepare.test_share, or use LOO-full"
        )
    time = nw.col("timestamp")
    table = (
        events.with_columns((time < valid_cut).cast(nw.Int64).alias("t"), (time < test_cut).cast(nw.Int64).alias("v"))
        .group_by("user")
        .agg(nw.len().alias("events"), nw.col("t").sum().alias("train_end"), nw.col("v").sum().alias("valid_end"))
        .sort("user")
    )
    facts = {"rule": "events from a cut on", "valid_cut": valid_cut, "test_cut": test_cut, "cases": config.cases}
    return table, facts


def corrupt(events: Frame, table: Frame, num_items: int, share: float, seed: int) -> Frame:
    """Give `share` of the training events a uniformly drawn item that is not among the user's later events.

    Args:
        events: user, item, ..., ordered by user and time.
        table: what `ends` returned for them.
        num_items: items are 1 to this.
        share: of the training events.
        seed: of the draws.

    Raises:
        ValueError: a user's validation and test events hold every item there is.
    """
    if share == 0:
        return events
    generator = np.random.default_rng(seed)
    number, train_end = (table[name].to_numpy() for name in ("events", "train_end"))
    user = np.repeat(np.arange(len(number)), number)
    in_train = np.arange(len(events)) < np.repeat(np.cumsum(number) - number + train_end, number)
    item = events["item"].to_numpy().astype(np.int64)
    later = np.unique((user * (num_items + 1) + item)[~in_train])
    if len(later) and np.bincount(later // (num_items + 1)).max() >= num_items:
        raise ValueError("prepare.noise_share: a user's later events hold every item, there is none to draw")
    places = np.flatnonzero(in_train)
    wanted = generator.choice(places, size=round(share * len(places)), replace=False)
    while len(wanted):
        item[wanted] = generator.integers(1, num_items + 1, size=len(wanted))
        wanted = wanted[np.isin(user[wanted] * (num_items + 1) + item[wanted], later)]
    column = nw.new_series("item", item.tolist(), nw.Int32, backend=nw.get_native_namespace(events))
    return events.with_columns(column)
