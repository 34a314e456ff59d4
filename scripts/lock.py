"""Writes requirements.lock, which has the SHA-256 of every file that may be installed, and chooses from it.

`make lock` runs it without arguments after a change of constraints.txt or pyproject.toml; that needs uv and a package
index. Versions are those of constraints.txt. torch and the CUDA packages that only its other builds need are left out:
the CPU build, the CUDA build and a wheel made at home have the same version and other digests.

With arguments, it prints the entries that these groups need: `core` stands for the dependencies of the project, and
every other name for an extra. The parts of `pipeline` have no group. `make setup` and the Dockerfile install what it
prints.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
# docs, spark and the parts of pipeline are left out
GROUPS = ("core", "pipeline", "text", "serve", "otel", "cluster", "services", "dev", "sbom")
LEFT_OUT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEADER = (
    "# Written by `make lock`: pins of constraints.txt with digests, and below each the groups that need it; torch is "
    "left out, see scripts/lock.py\n"
)
ENTRY = re.compile(r"^\w.*(?:\n +.*)*\n", re.MULTILINE)


def main(groups: Sequence[str]) -> int:
    """Write the lock, or print the entries that `groups` need; return the exit status."""
    if unknown := set(groups) - set(GROUPS):
        sys.stderr.write(f"not in requirements.lock: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}\n")
        return 1
    if groups:
        sys.stdout.write("".join(chosen(groups)))
    else:
        write()
    return 0


def chosen(groups: Sequence[str]) -> list[str]:
    """Return the entries of the lock that the groups need."""
    entries = ENTRY.findall(LOCK.read_text(encoding="utf-8"))
    return [entry for entry in entries if set(entry.rpartition("# ")[2].strip().split(", ")) & set(groups)]


def write() -> None:
    """Write the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = {"core": project["dependencies"], **project["optional-dependencies"]}
    needed = {group: {_name(entry) for entry in _compiled(requirements[group])} for group in GROUPS}
    lines = []
    for entry in _compiled([name for group in GROUPS for name in requirements[group]], "--generate-hashes"):
        groups = [group for group in GROUPS if _name(entry) in needed[group]]
        assert groups, entry
        if not LEFT_OUT.match(entry):
            assert "--hash=sha256:" in entry, entry
            assert "://" not in entry, f"an address: {entry}"
            lines.append(f"{entry}    # {', '.join(groups)}\n")
    LOCK.write_text(HEADER + "".join(lines), encoding="utf-8")


def _name(entry: str) -> str:
    return entry.partition("==")[0]


def _compiled(requirements: Sequence[str], *flags: str) -> list[str]:
    """Return an entry for each package that the requirements need, on every platform.

    Raises:
        CalledProcessError: uv found no solution; its message is on stderr.
    """
    command = ["uv", "pip", "compile", "-", "--universal", "--quiet", "--constraint=constraints.txt", *flags]
    command += ["--python-version=3.11", "--no-header", "--no-annotate"]
    done = subprocess.run(
        command, cwd=ROOT, input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
    )
    return ENTRY.findall(done.stdout)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]).split()))
