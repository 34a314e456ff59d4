"""Targets, and the search for inputs that end in a traceback or do not end at all."""

from __future__ import annotations

import faulthandler
import hashlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Target:
    """What is fuzzed: `run` may end well or raise an `allowed` error with a message; anything else is a defect."""

    name: str
    inputs: SearchStrategy[Any]
    run: Callable[[Any], None]
    allowed: tuple[type[Exception], ...] = (ValueError,)
    seconds: float = 10.0  # more for one input is a hang


@dataclass
class Tally:
    """What a search has found; `failures` maps what they have in common to the file with one of them."""

    inputs: int = 0
    refused: int = 0
    tracebacks: int = 0
    hangs: int = 0
    failures: dict[str, str] = field(default_factory=dict)


class HangError(Exception):
    """An input took longer than its target allows."""


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
    """Raise `HangError` when the time is up; end the process where native code does not come back even then."""

    def stop(*_: object) -> None:
        raise HangError(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(6 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def explore(target: Target, seconds: float, folder: Path) -> Tally:
    """Try inputs until `seconds` are up; keep one shrunk input of each failure in `folder`."""
    tally, end, number = Tally(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        failure = _round(target, tally, number, end, folder)
        if failure:
            tally.failures[signature(failure[1])] = str(save(folder, target, *failure))
    return tally


def _round(target: Target, tally: Tally, number: int, end: float, folder: Path) -> tuple[Any, Exception] | None:
    """Try some hundred inputs; return the smallest that fails in a new way, and its error."""
    current = folder / f"{target.name}.current"  # the input at work, for the case that the process dies
    last: list[tuple[Any, Exception]] = []

    @seed(number)
    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def search(value: Any) -> None:
        if time.monotonic() > end:
            return
        current.write_text(repr(value), encoding="utf-8", errors="backslashreplace")
        tally.inputs += 1
        try:
            tally.refused += attempt(target, value)
        except Exception as error:
            hung = isinstance(error, HangError)
            tally.hangs += hung
            tally.tracebacks += not hung
            if signature(error) not in tally.failures:
                last.append((value, error))
                raise

    try:
        search()
    except Exception:
        if not last:  # not the target's
            raise
    current.unlink(missing_ok=True)
    return last[-1] if last else None


def signature(error: BaseException) -> str:
    """Return the kind of an error and the last line of the project's code that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/seqrec/" in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {place}"


def save(folder: Path, target: Target, value: Any, error: BaseException) -> Path:
    """Write an input and its traceback; return the file."""
    name = hashlib.sha256(signature(error).encode()).hexdigest()[:8]
    path = folder / f"{target.name}-{name}.txt"
    text = "".join(traceback.format_exception(error)) + f"\ninput = {value!r}\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
