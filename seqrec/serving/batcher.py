"""The model that is served, and the queue in front of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from seqrec.serving.recommender import Answer, Recommender, Request

logger = logging.getLogger(__name__)
PASS = 20.0  # cost of a pass, see `Request.cost`; its last list may exceed it
NO_CHAMPION = "no champion yet"
T = TypeVar("T")
Count = Callable[[Sequence[Request], Sequence[Answer]], None]  # told of every pass
Waiting = tuple[Request, asyncio.Future[tuple[Answer, str]]]


class PassError(RuntimeError):
    """The model failed in a pass; the log has the reason."""


class Served:
    """The recommender in use and its version, none until there is a champion; both change in one assignment."""

    def __init__(self, recommender: Recommender | None = None, version: str = "") -> None:
        self._current = None if recommender is None else (recommender, version)
        self.problem = ""  # why the registry's champion is not the one that is served, if anything is wrong

    @property
    def ready(self) -> bool:
        """Whether there is a recommender."""
        return self._current is not None

    @property
    def current(self) -> tuple[Recommender, str]:
        """The recommender and its version."""
        assert self._current is not None  # the guards let no request pass before
        return self._current

    def switch(self, recommender: Recommender, version: str) -> None:
        """Serve another version from the next pass on."""
        self._current = (recommender, version)


class Batcher:
    """Computes the lists of waiting requests in passes of the model; requests that arrive meanwhile join the next pass.

    A pass takes one list of each request in turn, up to a number and a cost. A request for many or expensive lists
    therefore delays others by a pass or two only.
    """

    def __init__(self, served: Served, largest: int, count: Count) -> None:
        self.served, self.largest, self.count = served, largest, count
        self.waiting: deque[deque[Waiting]] = deque()  # the lists of each request that are not computed yet
        self.some = asyncio.Event()  # set where a request waits
        self.worker = ThreadPoolExecutor(1, "model")
        self.turn = asyncio.Lock()  # of what is answered apart, so that passes come between
        self.apart_waiting = 0  # how many wait for it, or have it

    def answer(self, requests: Sequence[Request]) -> list[asyncio.Future[tuple[Answer, str]]]:
        """Return what will be the answers, each with the version of the model that gave it.

        Raises, where they are awaited:
            ValueError: see `Recommender.check`.
            PassError: the model failed.
        """
        loop = asyncio.get_running_loop()
        group = deque((request, loop.create_future()) for request in requests)
        if group:
            self.waiting.append(group)
            self.some.set()
        return [future for _, future in group]

    async def apart(self, answer: Callable[[Recommender], T], recommender: Recommender) -> T:
        """Return what `answer` gives of a recommender, between two batches.

        Raises:
            RuntimeError: the model failed.
        """
        self.apart_waiting += 1
        try:
            async with self.turn:
                return await asyncio.get_running_loop().run_in_executor(self.worker, answer, recommender)
        finally:
            self.apart_waiting -= 1

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        alone: deque[Waiting] = deque()  # whose pass with others failed: one of them may be the reason
        while True:
            if not alone:
                await self.some.wait()
            recommender, version = self.served.current
            taken = [alone.popleft()] if alone else self._next()
            waiting = self._able(recommender, taken)
            if not waiting:
                continue
            requests = [request for request, _ in waiting]
            try:
                answers = await loop.run_in_executor(self.worker, self._answers, recommender, requests)
            except Exception as error:  # one batch fails, the service goes on
                if len(waiting) > 1:
                    logger.warning("%d requests failed together, and are tried one by one: %s", len(waiting), error)
                    alone.extend(waiting)
                    continue
                logger.exception("a request failed")
                [(_, future)] = waiting
                if not future.done():
                    future.set_exception(PassError(str(error)))
                continue
            for (_, future), answer in zip(waiting, answers, strict=True):
                if not future.done():  # the caller may have gone
                    future.set_result((answer, version))

    def _next(self) -> list[Waiting]:
        """Return the lists of the next pass: one of each request in turn."""
        chosen: list[Waiting] = []
        cost = 0.0
        while self.waiting and len(chosen) < self.largest and cost < PASS:
            group = self.waiting.popleft()
            request, future = group.popleft()
            if group:
                self.waiting.append(group)
            if not future.done():  # the caller is still there
                chosen.append((request, future))
                cost += request.cost
        if not self.waiting:
            self.some.clear()
        return chosen

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
