"""Keeps for a while what takes long to compute, and computes one thing at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fastapi import HTTPException

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MOST = 100  # results that are kept
OLDEST = 10  # times as old as it should be: a result that is still given while a new one is computed


class Kept(Generic[K, V]):
    """Results by key. While one is computed anew, everybody gets the one before it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.known: dict[K, tuple[float, V]] = {}  # when it was computed, and what came out
        self.working: dict[K, asyncio.Task[V]] = {}  # one at most

    async def get(self, key: K, compute: Callable[[], V]) -> V:
        """Return what `compute` gives, or gave within `seconds`; it runs in a thread.

        Raises:
            HTTPException: 503, something else is being computed.
        """
        found = self.known.get(key)
        age = time.monotonic() - found[0] if found else math.inf
        if age >= self.seconds and not self.working:
            self.working[key] = asyncio.create_task(self._compute(key, compute))
            self.working[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        if found and age < OLDEST * self.seconds:
            return found[1]
        if key not in self.working:
            raise HTTPException(503, "another question to the store takes its time", {"Retry-After": "5"})
        return await asyncio.shield(self.working[key])  # who goes leaves the others their answer

    async def _compute(self, key: K, compute: Callable[[], V]) -> V:
        try:
            value = await asyncio.to_thread(compute)
            self.known[key] = time.monotonic(), value
            while len(self.known) > MOST:
                del self.known[next(iter(self.known))]
            return value
        finally:
            del self.working[key]
