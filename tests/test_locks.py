"""Two processes in one place: the second one says who is there, and changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

from seqrec.locks import LockedError, locked

HOLDER = """
import sys
from pathlib import Path
from seqrec.locks import locked
with locked(Path(sys.argv[1]), "the place"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_is_told_who_holds_the_lock_and_since_when(tmp_path):
    path = tmp_path / "deep" / ".lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"

        with (
            pytest.raises(LockedError, match=rf"^the place: in use by process {process.pid} on \S+ for \d+ s"),
            locked(path, "the place"),
        ):
            pass
        process.kill()  # a lock ends with its process
        process.wait()
        with locked(path, "the place"):
            assert path.with_name(".lock.owner").exists()
        assert not path.with_name(".lock.owner").exists()
