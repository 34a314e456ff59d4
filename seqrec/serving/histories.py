"""Looks users up in the store: those who ask while it works are looked up together, next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from seqrec.serving.events import Past, Store


class Histories:
    """The store, one lookup at a time: a thread per request costs more than the lookup."""

    def __init__(self, store: Store, longest: Callable[[], int]) -> None:
        """Take the store, and what says how many events of a user the models read."""
        self.store, self.longest = store, longest
        self.working = asyncio.Lock()
        self.users: set[str] = set()  # of the next lookup
        self.next: asyncio.Task[dict[str, Past]] | None = None

    async def pasts(self, users: Collection[str]) -> dict[str, Past]:
        """Return the past of `users`, and perhaps of others; every event that the store has now is in it.

        Raises:
            StoreError: the store does not answer.
        """
        self.users.update(users)
        if self.next is None:
            self.next = asyncio.create_task(self._look())
        return await asyncio.shield(self.next)  # who goes leaves the others their answer

    async def _look(self) -> dict[str, Past]:
        async with self.working:
            users, self.users, self.next = self.users, set(), None
            return await asyncio.to_thread(self.store.pasts, users, self.longest())
