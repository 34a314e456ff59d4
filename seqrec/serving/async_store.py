"""The store of events as the service uses it: no request waits for a database longer than for its own answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

from fastapi import HTTPException
from prometheus_client import Counter

from seqrec.serving.events import Shown, Store, StoreError, UserHistory
from seqrec.serving.rates import retry_after

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
HOUR = 3_600.0
MOST_WAITING = 20_000  # lists that wait to be written; more are lost, and counted
WRITE_EVERY_S = 0.2
MOST_KEPT = 100  # results that are kept
OLDEST = 10  # times as old as it should be: a result that is still given while a new one is computed


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task: asyncio would log it where all who waited for the task have gone."""
    if not task.cancelled():
        task.exception()


class AsyncStore:
    """The store, asked from the event loop: users are looked up together, and what was shown is written later."""

    def __init__(self, store: Store, lost: Counter) -> None:
        """Take the store, and the counter of lists that could not be written."""
        self.store, self.lost = store, lost
        self.looking, self.writing = asyncio.Lock(), asyncio.Lock()
        self.users: set[str] = set()  # of the next lookup
        self.lookup: asyncio.Task[dict[str, UserHistory]] | None = None
        self.shown: list[Shown] = []  # not written yet

    async def histories(self, users: Collection[str], longest: int) -> dict[str, UserHistory]:
        """Return the histories of `users`, and perhaps of others, with every event that the store has now.

        Those who ask during a lookup share the next one: a thread for each request costs more than the lookup.

        Raises:
            StoreError: the store does not answer.
        """
        self.users.update(users)
        if self.lookup is None:
            self.lookup = asyncio.create_task(self._look_up(longest))
            self.lookup.add_done_callback(_retrieve)
        return await asyncio.shield(self.lookup)  # who goes leaves the others their answer

    async def _look_up(self, longest: int) -> dict[str, UserHistory]:
        async with self.looking:
            users, self.users, self.lookup = self.users, set(), None
            return await asyncio.to_thread(self.store.histories, users, longest)

    def show(self, shown: Shown) -> None:
        """Take a list that was shown; the store gets it soon."""
        if len(self.shown) < MOST_WAITING:
            self.shown.append(shown)
        else:
            self.lost.inc()

    async def flush(self) -> None:
        """Write the lists that wait."""
        async with self.writing:
            lists, self.shown = self.shown, []
            if not lists:
                return
            try:
                await asyncio.to_thread(self.store.show, lists)
            except Exception as error:  # whatever it is, later lists are written
                self.lost.inc(len(lists))
                logger.error("%d answers could not be written to the event store: %s", len(lists), error)

    async def write(self) -> None:
        """Write what is shown, several times a second, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.flush()

    async def expire(self, days: float) -> None:
        """Delete what is older than `days`, every hour, until cancelled."""
        while True:
            try:
                if number := await asyncio.to_thread(self.store.expire, days):
                    logger.info("%d stored events older than %g days were deleted", number, days)
            except StoreError as error:  # the next time may go well
                logger.error("old events could not be deleted from the event store: %s", error)
            await asyncio.sleep(HOUR)


class Kept(Generic[K, V]):
    """Results of long questions by key. While one is computed anew, everybody gets the one before it."""

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
            self.working[key].add_done_callback(_retrieve)
        if found and age < OLDEST * self.seconds:
            return found[1]
        if key not in self.working:
            raise HTTPException(
                503, "another query to the event store is still running; try again later", retry_after(5)
            )
        return await asyncio.shield(self.working[key])  # who goes leaves the others their answer

    async def _compute(self, key: K, compute: Callable[[], V]) -> V:
        try:
            value = await asyncio.to_thread(compute)
            self.known[key] = time.monotonic(), value
            while len(self.known) > MOST_KEPT:
                del self.known[next(iter(self.known))]
            return value
        finally:
            del self.working[key]
