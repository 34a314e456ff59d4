"""Writes requirements.lock: what `make setup` installs, with the SHA-256 of every file that may be taken for it.

`make lock` runs it after a change of constraints.txt or pyproject.toml; it needs uv and a package index. Versions are
those of constraints.txt. torch and the CUDA packages that only its other builds need are left out: the CPU build, the
CUDA build and a wheel made at home have the same version and other digests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("pipeline", "text", "serve", "dev")  # as `make setup`
LEFT_OUT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEADER = "# Written by `make lock`: pins of constraints.txt with digests; torch is left out, see scripts/lock.py\n"


def main() -> int:
    """Write the file; return uv's exit status."""
    command = [
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        *(f"--extra={name}" for name in EXTRAS),
        "--universal",
        "--quiet",
    ]
    command += [
        "--constraint=constraints.txt",
        "--python-version=3.11",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return done.returncode
    entries = re.findall(r"^\S.*(?:\n +.*)*\n", done.stdout, re.MULTILINE)
    kept = [entry for entry in entries if not LEFT_OUT.match(entry)]
    unlike = [entry for entry in kept if "--hash=sha256:" not in entry or "://" in entry]  # no address belongs in here
    assert not unlike, unlike
    (ROOT / "requirements.lock").write_text(HEADER + "".join(kept), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
