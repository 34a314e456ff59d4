"""The model that is served, and the queue in front of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from seqrec.serving.recommender import Answer, Recommender, Request

logger = logging.getLogger(__name__)
T = TypeVar("T")
Count = Callable[[Sequence[Request], Sequence[Answer]], None]  # told of every pass
Waiting = tuple[Request, asyncio.Future[tuple[Answer, str]]]


class Served:
    """The recommender in use and its version; both change in one assignment."""

    def __init__(self, recommender: Recommender, version: str) -> None:
        self.current = (recommender, version)
        self.problem = ""  # why the registry's champion is not the one that is served, if anything is wrong


class Batcher:
    """Hands all waiting requests to the model as one batch; the next one gathers while it works."""

    def __init__(self, served: Served, largest: int, count: Count) -> None:
        self.served, self.largest, self.count = served, largest, count
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self.worker = ThreadPoolExecutor(1, "model")

    def answer(self, request: Request) -> asyncio.Future[tuple[Answer, str]]:
        """Return what will be the answer, and the version of the model that gave it.

        Raises, where it is awaited:
            ValueError: see `Recommender.check`.
            RuntimeError: the model failed.
        """
        future: asyncio.Future[tuple[Answer, str]] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((request, future))
        return future

    async def apart(self, answer: Callable[[Recommender], T], recommender: Recommender) -> T:
        """Return what `answer` gives of a recommender, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, answer, recommender)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = [await self.queue.get()]
            while len(waiting) < self.largest and not self.queue.empty():
                waiting.append(self.queue.get_nowait())
            recommender, version = self.served.current
            waiting = self._able(recommender, waiting)
            if not waiting:
                continue
            requests = [request for request, _ in waiting]
            try:
                answers = await loop.run_in_executor(self.worker, self._answers, recommender, requests)
            except Exception as error:  # one batch fails, the service goes on
                logger.exception("a batch of %d failed", len(waiting))
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(RuntimeError(str(error)))
                continue
            for (_, future), answer in zip(waiting, answers, strict=True):
                if not future.done():  # the caller may have gone
                    future.set_result((answer, version))

    def _answers(self, recommender: Recommender, requests: Sequence[Request]) -> list[Answer]:
        answers = recommender.answer(requests)
        self.count(requests, answers)
        return answers

    @staticmethod
    def _able(recommender: Recommender, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return who can be answered; the others get the ValueError, and spoil nobody's batch."""
        able = []
        for request, future in waiting:
            if future.done():  # the caller has gone
                continue
            try:
                recommender.check(request)
            except ValueError as error:
                future.set_exception(error)
            else:
                able.append((request, future))
        return able
