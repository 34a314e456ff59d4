"""How much a caller may ask for: a token bucket for each."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

CALLERS = 10_000  # whose rates are known at once
BURST_S = 2.0  # so many seconds' requests may come at once


class Rates:
    """A token bucket for each caller; the callers that were not seen for the longest time are forgotten."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self.most = max(1.0, BURST_S * per_second)
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, cost: float = 1.0, needed: float = 1.0) -> float:
        """Count `cost` and return 0, or return the seconds until the caller has as many tokens as are needed.

        An expensive request may be granted with fewer tokens than it costs. The next requests then wait until it is
        paid for.
        """
        now = time.monotonic()
        tokens, seen = self.buckets.pop(caller, (self.most, now))
        tokens = min(self.most, tokens + (now - seen) * self.per_second)
        granted = tokens >= needed
        self.buckets[caller] = (tokens - cost * granted, now)
        while len(self.buckets) > CALLERS:
            self.buckets.popitem(last=False)
        return 0.0 if granted else (needed - tokens) / self.per_second


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header that says when to come back."""
    return {"Retry-After": str(math.ceil(seconds))}
