"""Warnings about datasets that are too small, too coarse or too repetitive, issued before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqrec.data import ties
from seqrec.data.sequences import Sequences, cases, train_events

USERS, ITEMS, STEPS = 1_000, 50, 20  # warn about fewer users (all, or with cases), items or steps per epoch
TIES, ORDERED_TIES, FLATTERING, AT_ONCE = 0.5, 0.1, 0.02, 0.2  # warn about larger shares of events
REPEATS = 0.1  # from this share of events that repeat an item, `auto` keeps past items as candidates
BUSIEST, FEW = 0.1, 10  # a user with a larger share of the events, or of the validation cases and more of them, is odd
DUPLICATES, OUTSIDE = 0.05, 0.5  # warn about larger shares of events that are left out
MOST_COUNTED = 20_000_000  # largest number of events for which repeats are counted


def repeats(data: Sequences) -> float:
    """Return the share of training events that repeat an item of the user, without users that are no persons."""
    user, item = train_events(data)
    rare = user.bincount()[user] <= BUSIEST * len(user)
    if rare.any():
        user, item = user[rare], item[rare]
    pairs = user * (data.num_items + 1) + item
    return 1 - len(pairs.unique()) / max(1, len(pairs))


def repeats_at_once(data: Sequences) -> float:
    """Return the share of training events that repeat the item of the user's event before."""
    user, item = train_events(data)
    return float(((user[1:] == user[:-1]) & (item[1:] == item[:-1])).sum()) / max(1, len(item))


def busiest(data: Sequences) -> float:
    """Return the share of the validation cases that one user has; 0 if no user has more than `FEW` of them."""
    number = cases(data, "valid").user.bincount(minlength=1)
    return float(number.max()) / float(number.sum()) if number.max() > FEW else 0.0


def of(data: Sequences, *, filter_seen: bool, steps: int | None = None) -> list[str]:
    """Return a sentence for each reason to doubt models and metrics on `data`."""
    few = len(data.items) <= MOST_COUNTED
    return warnings(
        data.card,
        steps=steps,
        repeated=repeats(data) if few else None,
        at_once=repeats_at_once(data) if few else 0.0,
        one_user=busiest(data),
        filter_seen=filter_seen,
        ordered=ties.are_ordered(data),
    )


def warnings(
    card: Mapping[str, Any],
    *,
    steps: int | None = None,
    repeated: float | None = None,
    at_once: float = 0.0,
    one_user: float = 0.0,
    filter_seen: bool = True,
    ordered: bool | None = None,
) -> list[str]:
    """Return a sentence for each reason to doubt models and metrics on a dataset.

    Args:
        card: the split card.
        steps: steps per epoch.
        repeated: share of events that repeat an item of the user.
        at_once: share of events that repeat the item of the event before.
        one_user: largest share of the validation cases that belong to one user.
        filter_seen: whether seen items are left out of the candidates.
        ordered: whether events of the same time follow an order (ties.py).
    """
    counts = card["counts"]
    users, items, dropped = counts["users"], counts["items"], card["dropped"]
    tied = counts["tied_events"] / max(1, counts["events"])
    total = counts["events"] + sum(number for rule, number in dropped.items() if "events" in rule)
    double, outside = (dropped.get(rule, 0) for rule in ("duplicate events", "events outside the k-core"))
    found = []
    if users < USERS:
        found.append(f"only {users:,} users: intervals are wide, and simple counts may do as well as a model")
    elif (tested := users - counts["users_without_cases"]) < USERS:
        found.append(f"only {tested:,} of {users:,} users have validation or test events: intervals are wide")
    if items < ITEMS:
        found.append(f"only {items:,} items: ten recommendations are a large part of them, so the metrics say little")
    if double > DUPLICATES * total:
        same = "user and item" if card["deduplicate"] == "first_pair" else "user, item and time"
        found.append(f"{double / total:.0%} of the events repeat the {same} of another event and are left out")
    if outside > OUTSIDE * total:
        found.append(f"{outside / total:.0%} of the events are outside the k-core; the metrics do not cover them")
    if ordered and tied > ORDERED_TIES:
        found.append(
            f"{tied:.0%} of the events have the same time as the previous one, in an order that is not random, as in a "
            "file sorted by item: models learn this order, so the metrics promise more than recommendations can hold"
        )
    elif tied > TIES:
        found.append(f"{tied:.0%} of the events have the same time as the previous one; the file decides their order")
    if steps is not None and steps < STEPS:
        found.append(f"only {steps} steps per epoch: lower finetune.batch_size, train more epochs, or set both to auto")
    if at_once > AT_ONCE and not filter_seen:
        found.append(
            f"{at_once:.0%} of the events repeat the item of the event before: if the log has several kinds of events, "
            "such as views and purchases, keep one kind; otherwise the item just seen is often recommended"
        )
    if one_user > BUSIEST:
        found.append(f"one user has {one_user:.0%} of the validation cases: is it a person?")
    if repeated is not None and repeated > FLATTERING and filter_seen:
        found.append(
            f"{repeated:.0%} of the events repeat an item of the user: no list has such items, but as targets they "
            "rank high, because the user's other items are no candidates; the slice repeat=no of the report is without "
            "them; to recommend them, set filter_seen: false"
        )
    return found
