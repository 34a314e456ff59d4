"""What the benchmarks share: clocks, peak memory, tables.

It needs torch and pyarrow alone, since the peers' scripts import it inside environments that lack everything else.
"""

from __future__ import annotations

import platform
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY = Path("/proc/self/status")


class Cost(NamedTuple):
    """Seconds that passed, and seconds that the cores worked."""

    wall: float
    cpu: float  # of this process and of the children that have ended

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Cost:
    """Return a point in time; the difference of two is what the work between them cost."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Cost(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages))


def cost_of(work: Callable[[], object]) -> Cost:
    """Return what one call costs."""
    began = now()
    work()
    return now() - began


def peak_memory() -> float:
    """Return the largest resident size of the process so far in MiB."""
    if MEMORY.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", MEMORY.read_text())
        assert found
        return int(found[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest sum of bytes that a second call has allocated and not yet freed."""
    work()
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        warnings.simplefilter("ignore")
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the first column is text, the others are figures."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine(threads: int) -> str:
    """Return one line that says where the figures come from."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    processor = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{processor}, {threads} threads, torch {torch.__version__}, Python {platform.python_version()}"
