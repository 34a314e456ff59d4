"""Fuzz every target for an equal share of the time: `make fuzz MINUTES=20`.

The search runs in a process of its own, so that a crash of native code counts as a failure and the search goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from fuzz.harness import Tally, explore
from fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--only", default="", help="names of targets that begin like this")
    parser.add_argument("--out", type=Path, default=Path("state/fuzz"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.child or [name for name in TARGETS if name.startswith(arguments.only)]
    if not names:
        parser.error(f"--only: no target begins with {arguments.only!r}; there are {', '.join(TARGETS)}")
    share = arguments.minutes / len(names)
    if arguments.child:
        for name in names:
            tally = explore(TARGETS[name], 60 * share, arguments.out)
            (arguments.out / f"{name}.json").write_text(json.dumps(asdict(tally)))
        return 0
    for name in names:
        (arguments.out / f"{name}.json").unlink(missing_ok=True)
    tallies: dict[str, Tally] = {}
    while left := [name for name in names if name not in tallies]:
        tallies |= run_child(left, share * len(left), arguments.out)
    return report(tallies)


def run_child(names: list[str], minutes: float, out: Path) -> dict[str, Tally]:
    """Return what the search of the targets found; if the process died, the last of them is the one it died in."""
    command = [sys.executable, "-m", "fuzz", "--minutes", str(minutes), "--out", str(out), "--child", *names]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    tallies: dict[str, Tally] = {}
    for name in names:
        result = out / f"{name}.json"
        if not result.is_file():
            current, kept = out / f"{name}.current", out / f"{name}-died.txt"
            value = current.read_text(errors="replace") if current.is_file() else "none"
            kept.write_text(f"{done.stderr[-20_000:]}\ninput = {value}\n")
            hung = "Timeout (" in done.stderr  # faulthandler's word for it
            kind = "the process hung" if hung else "the process died"
            return {**tallies, name: Tally(1, 0, int(not hung), int(hung), {kind: str(kept)})}
        tallies[name] = Tally(**json.loads(result.read_text()))
    return tallies


def report(tallies: Mapping[str, Tally]) -> int:
    """Print a line for each target and their sum; return the exit status."""
    counts = ("inputs", "refused", "tracebacks", "hangs")
    print(f"{'target':<24}" + "".join(f"{count:>12}" for count in counts))
    for name, tally in tallies.items():
        print(f"{name:<24}" + "".join(f"{getattr(tally, count):>12,}" for count in counts))
        for kind, path in tally.failures.items():
            print(f"  {kind}: {path}")
    sums = [sum(getattr(tally, count) for tally in tallies.values()) for count in counts]
    print(f"{'all':<24}" + "".join(f"{value:>12,}" for value in sums))
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
