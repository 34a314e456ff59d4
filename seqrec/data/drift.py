"""Drift between two dumps of a log: how many users and items are new, and how the distribution has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.integer]
EMPTY_SHARE = 1e-4  # replaces the share of an empty bin, whose logarithm is undefined
BINS = 10


def stability_index(expected: NDArray[np.floating], observed: NDArray[np.floating]) -> float:
    """Return the population stability index, sum((p - q) ln(p / q)), of two lists of shares."""
    q, p = np.maximum(expected, EMPTY_SHARE), np.maximum(observed, EMPTY_SHARE)
    return float(np.sum((p - q) * np.log(p / q)))


def report(before: Counts, now: Counts) -> dict[str, Any]:
    """Return how the events of items (or users) have changed.

    Drift is the stability index of the added events over eleven bins: ten of known items, from most to least popular,
    each with a tenth of the earlier events; and one of new items.

    Args:
        before: (K,) events of items 1, 2, ... in the old dump.
        now: (N,) events in the new dump, K <= N, old items first.
    """
    known = len(before)
    earlier = np.pad(before, (0, len(now) - known))
    added = np.maximum(now - earlier, 0)
    order = np.argsort(-before, kind="stable")
    reached = np.cumsum(before[order]) - before[order]
    bins = np.full(len(now), BINS)
    bins[order] = np.minimum(reached * BINS // max(1, before.sum()), BINS - 1)
    shares = [
        np.bincount(bins, weights=events, minlength=BINS + 1) / max(1, events.sum()) for events in (earlier, added)
    ]
    return {
        "known": known,
        "new": len(now) - known,
        "gone": int(((before > 0) & (now[:known] == 0)).sum()),
        "events_added": int(added.sum()),
        "events_removed": int(np.maximum(before - now[:known], 0).sum()),
        "share_of_new": round(float(shares[1][BINS]), 6),
        "drift": round(stability_index(*shares), 6) if added.sum() else 0.0,
    }
