"""Prints how large the layers of the image are: `python scripts/image_size.py core serve`, or other groups of the lock.

Packages are measured as they are installed here, whose versions are those of the lock; `make setup` installs them. The
base image is not measured: python:3.11-slim takes about 130 MB, and 45 MB compressed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lock import ROOT, chosen

COPIED = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)


def main(groups: Sequence[str]) -> int:
    """Print a row per layer; return the exit status."""
    names = [re.split("==", entry)[0] for entry in chosen(groups)]
    layers = {"packages": [path for name in names for path in installed(name)], "torch": installed("torch")}
    for layer, paths in {**layers, "code": code()}.items():
        size, compressed = (number / 1e6 for number in measured(paths))
        sys.stdout.write(f"{layer:10} {size:8.1f} MB {compressed:8.1f} MB compressed\n")
    return 0


def installed(package: str) -> list[Path]:
    """Return the files of an installed package; none, after a warning, if it is not installed."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        sys.stderr.write(f"{package} is not installed here, and not counted\n")
        return []
    return [Path(str(found.locate_file(file))) for file in found.files or ()]


def code() -> list[Path]:
    """Return the files that the last layers of the Dockerfile copy from the repository."""
    last = (ROOT / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    folders = [name for line in COPIED.findall(last) for name in line.split()]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def measured(paths: Iterable[Path]) -> tuple[int, int]:
    """Return the bytes of the files, and their bytes as zlib compresses them, about as a registry keeps them."""
    stream, size, compressed = zlib.compressobj(6), 0, 0
    for path in {path for path in paths if path.is_file() and path.suffix != ".pyc"}:
        data = path.read_bytes()
        size, compressed = size + len(data), compressed + len(stream.compress(data))
    return size, compressed + len(stream.flush())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
