"""How long commands take to begin: `python -m benchmarks.startup --run FOLDER`, in seconds of a core.

A processor's seconds are what a quiet machine takes, and do not grow when it is busy, as the clock's do.

tests/test_cli.py and tests/commands/test_recommend.py say which packages each command must not import. Importing torch
takes most of the time of `recommend`; the last row is that alone.

FOLDER is a project with a champion and an item id to ask for. Each figure is the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.meter import markdown

LIMITS = {"--help": 0.5, "leaderboard --help": 1.0, "recommend": 2.0}  # seconds


def seconds(arguments: list[str], folder: Path, repeats: int) -> float:
    """Return the processor time, user and system, of `python ARGUMENTS`, the best of `repeats`."""
    times = []
    for _ in range(repeats):
        began = _used()
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
        times.append(_used() - began)
    return min(times)


def _used() -> float:
    """Return the processor time of all processes that this one has awaited."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path(), help="project folder (default: here)")
    parser.add_argument("--history", default="50,181", help="item ids of that project (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    commands = {name: name.split() for name in LIMITS} | {"recommend": ["recommend", "--history", flags.history]}
    rows = [
        (name, f"{seconds(['-m', 'seqrec', *commands[name]], flags.run, flags.repeats):.2f}", f"{limit:.1f}")
        for name, limit in LIMITS.items()
    ]
    rows.append(("import torch, nothing else", f"{seconds(['-c', 'import torch'], flags.run, flags.repeats):.2f}", "-"))
    print(markdown(("command", "processor s", "at most"), rows))


if __name__ == "__main__":
    main()
