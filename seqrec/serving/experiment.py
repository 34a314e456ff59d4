"""Two versions behind one service: who gets which, and which one leads to more clicks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from seqrec.evaluation.intervals import student
from seqrec.serving.events import Clicks

CONFIDENCE = 0.95


def in_candidate(user: str, version: str, share: float) -> bool:
    """Return whether `user` belongs to the share of users whom the candidate of this `version` answers.

    The same user gets the same answer for as long as the candidate stays the same, and keeps the candidate when the
    share grows. Another candidate divides the users anew.
    """
    digest = hashlib.sha256(f"{version}:{user}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Click-through of one version."""

    version: str
    users: int
    answers: int
    rate: float  # NaN without an answer
    error: float  # standard error of the rate, users being the sample; NaN with fewer than two

    @classmethod
    def of(cls, version: str, clicks: Sequence[Clicks]) -> Rate:
        """Return the rate of a version.

        Answers to one user are alike, and users are what is assigned at random. The rate is therefore a ratio of sums
        over users, and its error comes from the users' residuals (the delta method; Deng et al., KDD 2018).
        """
        own = [one for one in clicks if one.version == version]
        answers, users = sum(one.answers for one in own), len(own)
        rate = sum(one.clicked for one in own) / answers if answers else math.nan
        residuals = sum((one.clicked - rate * one.answers) ** 2 for one in own)
        error = math.sqrt(residuals * users / (users - 1)) / answers if users > 1 else math.nan
        return cls(version=version, users=users, answers=answers, rate=rate, error=error)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two rates, and their difference with an interval.

    The interval is NaN where a version has fewer than two users, and where neither rate varies between users.
    """

    champion: Rate
    candidate: Rate
    difference: float  # candidate less champion
    low: float
    high: float

    def __str__(self) -> str:
        interval = f"{CONFIDENCE:.0%} interval {self.low:+.4f} to {self.high:+.4f}"
        if math.isnan(self.low):
            interval = "no interval: too few users or clicks"
        difference = "unknown" if math.isnan(self.difference) else f"{self.difference:+.4f}"
        return f"difference {difference}, {interval}"


def compare(clicks: Sequence[Clicks], champion: str, candidate: str) -> Comparison:
    """Compare the click-through of two versions by Welch's two-sample t interval."""
    first, second = Rate.of(champion, clicks), Rate.of(candidate, clicks)
    error = math.hypot(first.error, second.error)
    parts = sum(rate.error**4 / (rate.users - 1) for rate in (first, second) if rate.error > 0)
    margin = student((1 + CONFIDENCE) / 2, error**4 / parts) * error if error > 0 else math.nan
    difference = second.rate - first.rate
    return Comparison(
        champion=first, candidate=second, difference=difference, low=difference - margin, high=difference + margin
    )
