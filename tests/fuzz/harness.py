"""Targets, and one attempt at an input: it may end well or with a clear error, and must end."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Target:
    """What is fuzzed: `run` may end well or raise an `allowed` error with a message; anything else is a defect."""

    name: str
    inputs: SearchStrategy[Any]
    run: Callable[[Any], None]
    allowed: tuple[type[Exception], ...] = (ValueError,)
    seconds: float = 10.0  # of processor time; more for one input is a hang


class HangError(Exception):
    """An input took more processor time than its target allows."""


def attempt(target: Target, value: Any) -> bool:
    """Run the target on one input and return whether it was refused with a clear error.

    Raises:
        HangError: it took too long.
        Exception: whatever `run` raises besides the allowed errors.
    """
    try:
        with limited(target.seconds):
            target.run(value)
    except target.allowed as error:
        if not str(error):
            raise AssertionError("an error without a message") from error
        return True
    return False


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `HangError` after `seconds` of processor time, however busy the machine is.

    End the process where it waits, or where native code does not come back even then.
    """

    def stop(*_: object) -> None:
        raise HangError(f"not finished after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(6 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
