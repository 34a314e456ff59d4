"""Duplicates, numbering and splits of the interactions, written in Narwhals for every table engine.

Events with equal timestamps stay in source order; no function orders them by item. Events are lazy frames with the
columns user, item (integer keys), timestamp and row. Per-user values are small enough to be arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
from numpy.typing import NDArray

from seqrec.config import PrepareConfig

Frame = nw.LazyFrame[Any]
IntArray = NDArray[np.integer]
NEGATIVES = 100  # sampled negatives per user under LOO-101
DAY = 86_400
TIMES = 1 << 37  # larger than any timestamp in seconds: ingest accepts less than 1e11


class Ends(NamedTuple):
    """Numbers of events at which the splits of each user end, in order of the users' numbers."""

    events: IntArray  # (U,)
    train_end: IntArray  # (U,)
    valid_start: IntArray  # (U,) train_end, or under temporal later, after events that are read but not learnt
    valid_end: IntArray  # (U,)


def deduplicate(events: Frame, rule: str) -> Frame:
    """Keep one row of each group of duplicate events, the first in source order.

    Args:
        events: user, item, timestamp, row; complete for each user.
        rule: exact (same user, item and time), first_pair (same user and item; the earliest is kept) or none.
    """
    if rule == "none":
        return events
    distinct = events.group_by("user", "item", "timestamp").agg(nw.col("row").min())
    if rule == "exact":
        return distinct
    earliest = distinct.group_by("user", "item").agg(nw.col("timestamp").min())
    return distinct.join(earliest, on=["user", "item", "timestamp"], how="semi")


def size(frame: Frame) -> int:
    """Return the number of rows."""
    return int(frame.select(nw.len().alias("rows")).collect()["rows"].item())


def sample_users(user_ids: NDArray[np.object_], number: int, seed: int) -> IntArray:
    """Return the indices in `user_ids` of `number` random users; depends on the seed and the set of ids only."""
    drawn = np.random.default_rng(seed).choice(len(user_ids), size=number, replace=False)
    return np.argsort(user_ids)[drawn]


def number(events: Frame, column: str, name: str, known: Frame | None = None, first: int = 1) -> Frame:
    """Return a table (name, column, events): ids `first`, `first` + 1, ... in order of first appearance in the source.

    Ids of `known`, a table (name, column), keep the number they have there, whether they occur or not; `first` is
    above all of those.
    """
    counted = events.group_by(column).agg(nw.col("row").min(), nw.len().cast(nw.Int64).alias("events"))
    fresh = counted if known is None else counted.join(known, on=column, how="anti")
    fresh = fresh.with_row_index(name, order_by="row").select((nw.col(name) + first).cast(nw.Int32), column, "events")
    if known is None:
        return fresh
    old = known.join(counted, on=column, how="left").select(name, column, nw.col("events").fill_null(0))
    return nw.concat([old, fresh])


def keyed(events: Frame, first: int, *, newest_first: bool = False) -> Frame:
    """Return (key, item, row), where sorting by `key` and `row` sorts by user, time and source row.

    Sorting one number for user and time is several times as fast as sorting two. `times_of` recovers the times.

    Args:
        events: user, item, timestamp, row.
        first: the lowest user number; the highest is less than 2^26 above it.
        newest_first: whether the source has a user's events of one time from the last to the first.
    """
    row = -nw.col("row") if newest_first else nw.col("row")
    key = (nw.col("user") - first).cast(nw.Int64) * TIMES + nw.col("timestamp")
    return events.select(key.alias("key"), "item", row.alias("row"))


def times_of(key: IntArray) -> IntArray:
    """Return the timestamps in the keys of `keyed`."""
    return key & (TIMES - 1)


def draw_negatives(item: IntArray, events: IntArray, num_items: int, number: int, seed: int) -> IntArray:
    """Return (U, number): for each user, distinct items without interactions, drawn uniformly.

    Args:
        item: (E,) item of every event, grouped by user.
        events: (U,) number of events of each user.
        num_items: items are numbered from 1 to `num_items`.
        number: items per user.
        seed: seed of the draw.

    Raises:
        ValueError: a user has fewer than `number` unseen items.
    """
    user = np.repeat(np.arange(len(events)), events)
    seen = np.unique(user * (num_items + 1) + item)
    unseen = num_items - np.bincount(seen // (num_items + 1), minlength=len(events))
    if (unseen < number).any():
        raise ValueError(
            f"prepare.protocol LOO-101: {(unseen < number).sum()} users have fewer than {number} unseen items in a "
            f"catalogue of {num_items}: use LOO-full, or a larger catalogue"
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


def ends(
    events: Frame, number: IntArray, config: PrepareConfig, cuts: tuple[int, int] | None = None
) -> tuple[Ends, dict[str, Any]]:
    """Return where each user's training, validation and test events end, and the entries of the split card.

    Events before train_end are training, those from valid_start to valid_end validation, and those after it test. Each
    validation or test event is a case whose input is all earlier events of the user. LOO-101 is LOO-full plus sampled
    negatives. Both, and RATIO-full, leak the future of other users into training, as in the papers; temporal does not.

    Args:
        events: events with users and items numbered from 1; with `cuts`, also whether each is `learnt`.
        number: (U,) number of events of users 1, 2, ...
        config: section `prepare`.
        cuts: for protocol temporal, the start times of validation and test; None: computed from `events`, and all
            events before the first are learnt.
    """
    if config.protocol in ("LOO-full", "LOO-101"):
        return _leave_one_out(number, config)
    if config.protocol == "RATIO-full":
        return _ratio(number, config)
    learnt = nw.col("learnt") if cuts else nw.lit(True)
    return _temporal(events.with_columns(learnt=learnt), number, cuts or temporal_cuts(events, config), config)


def _leave_one_out(number: IntArray, config: PrepareConfig) -> tuple[Ends, dict[str, Any]]:
    """Each user's last event is test, the one before it validation; users with fewer than three events only train.

    With `val_users`, users without validation train on the event before the last.
    """
    enough = number >= 3
    validated = np.ones(len(number), dtype=bool)
    if config.val_users:
        able = np.flatnonzero(enough)
        drawn = np.random.default_rng(config.seed).choice(able, size=min(config.val_users, len(able)), replace=False)
        validated = np.isin(np.arange(len(number)), drawn)
    valid_end = number - enough
    train_end = valid_end - (enough & validated)
    return Ends(number, train_end, train_end, valid_end), {
        "rule": "last event for test, the one before it for validation"
    }


def _ratio(number: IntArray, config: PrepareConfig) -> tuple[Ends, dict[str, Any]]:
    """The last `test_share` of each user's events is test, the `valid_share` before it validation; rounded down."""
    test = np.floor(number * config.test_share + 1e-9).astype(np.int64)
    valid = np.floor(number * config.valid_share + 1e-9).astype(np.int64)
    train_end = number - test - valid
    return Ends(number, train_end, train_end, number - test), {"rule": "the last events of each user, by share"}


def temporal_cuts(events: Frame, config: PrepareConfig) -> tuple[int, int]:
    """Return the start times of validation and test that give each its share of `events`.

    Raises:
        ValueError: the timestamps cannot be divided into three periods.
    """
    share = 1 - config.test_share - config.valid_share
    total = size(events)
    ranks = (0, int(total * share), int(total * (1 - config.test_share)))
    earliest, valid_cut, test_cut = _times_at(events, ranks) if total else (0, 0, 0)
    if not earliest < valid_cut < test_cut:
        raise ValueError(
            "prepare.protocol temporal: the timestamps do not divide into three periods; "
            "change prepare.valid_share and prepare.test_share, or use LOO-full"
        )
    return valid_cut, test_cut


def _temporal(
    events: Frame, number: IntArray, cuts: tuple[int, int], config: PrepareConfig
) -> tuple[Ends, dict[str, Any]]:
    """Two points in time split the events of all users; training events are `learnt` and lie before the first one."""
    valid_cut, test_cut = cuts
    time = nw.col("timestamp")
    before = {"train": (time < valid_cut) & nw.col("learnt"), "read": time < valid_cut, "valid": time < test_cut}
    counted = events.select("user", **{name: mask.cast(nw.Int64) for name, mask in before.items()})
    table = counted.group_by("user").agg(nw.col(*before).sum()).collect()
    ends = Ends(number, *(np.zeros_like(number) for _ in before))
    for column, values in zip(before, ends[1:], strict=True):
        values[table["user"].to_numpy() - 1] = table[column].to_numpy()
    facts = {
        "rule": "events from a cut on",
        "valid_cut": valid_cut,
        "test_cut": test_cut,
        "cases": config.cases,
        "filter_on": config.filter_on,
        "users_without_training": int((ends.train_end == 0).sum()),
        "events_only_read": int((ends.valid_start - ends.train_end).sum()),
    }
    return ends, facts


def _times_at(events: Frame, ranks: tuple[int, ...]) -> list[int]:
    """Return the timestamps at some ranks of their sorted order; only the days that contain them are sorted."""
    days = events.select("timestamp", (nw.col("timestamp") // DAY).alias("day"))
    counted = days.group_by("day").agg(nw.len().alias("events")).collect().sort("day")
    stop = np.cumsum(counted["events"].to_numpy())
    found = []
    for rank in ranks:
        day = int(np.searchsorted(stop, rank, side="right"))
        times = days.filter(nw.col("day") == int(counted["day"][day])).collect()["timestamp"].to_numpy()
        found.append(int(np.sort(times)[rank - (stop[day - 1] if day else 0)]))
    return found


def with_noise(item: IntArray, ends: Ends, num_items: int, share: float, seed: int) -> IntArray:
    """Replace the item of `share` of the training events by a random one that is not among the user's later events.

    Args:
        item: (E,) item of every event, ordered by user and time.
        ends: ends of the users' splits.
        num_items: items are numbered from 1 to `num_items`.
        share: share of the training events.
        seed: seed of the draws.

    Raises:
        ValueError: a user's validation and test events contain all items.
    """
    if share == 0:
        return item
    generator = np.random.default_rng(seed)
    number, train_end = ends.events, ends.train_end
    user = np.repeat(np.arange(len(number)), number)
    in_train = np.arange(len(item)) < np.repeat(np.cumsum(number) - number + train_end, number)
    item = item.astype(np.int64)
    later = np.unique((user * (num_items + 1) + item)[~in_train])
    if len(later) and np.bincount(later // (num_items + 1)).max() >= num_items:
        raise ValueError(
            "prepare.noise_share: a user's later events contain every item, so no other item can be drawn: set it to 0"
        )
    candidates = np.flatnonzero(in_train)
    chosen = generator.choice(candidates, size=round(share * len(candidates)), replace=False)
    while len(chosen):
        item[chosen] = generator.integers(1, num_items + 1, size=len(chosen))
        chosen = chosen[np.isin(user[chosen] * (num_items + 1) + item[chosen], later)]
    return item
