"""Writes what was shown to the store, in the background: an answer never waits for it."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Counter

from seqrec.serving.events import Shown, Store, StoreError

logger = logging.getLogger(__name__)
MOST = 20_000  # lists that wait to be written; more are lost, and counted
EVERY_S = 0.2


class Impressions:
    """Lists on their way to the store."""

    def __init__(self, store: Store, lost: Counter) -> None:
        self.store, self.lost = store, lost
        self.waiting: list[Shown] = []
        self.writing = asyncio.Lock()

    def add(self, shown: Shown) -> None:
        """Take a list; the store gets it soon."""
        if len(self.waiting) < MOST:
            self.waiting.append(shown)
        else:
            self.lost.inc()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits."""
        async with self.writing:
            lists, self.waiting = self.waiting, []
            if not lists:
                return
            try:
                await asyncio.to_thread(self.store.show, lists)
            except StoreError as error:
                self.lost.inc(len(lists))
                logger.error("%d answers could not be written: %s", len(lists), error)
