"""Locks that allow one process at a time; they end with their process, and report who holds them since when."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from seqrec.errors import RetryableError

NAME = ".lock"  # name of the lock file of a folder


class LockedError(RetryableError):
    """Another process holds the lock; the message says which, and since when."""


@contextmanager
def locked(path: Path, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; the operating system releases it when the process ends.

    The lock is not reentrant.

    Args:
        path: path of the lock file, which is not deleted.
        what: text of the error message: what is in use, and how to avoid the conflict.
        wait_s: seconds to wait for another process that holds the lock.

    Raises:
        LockedError: another process holds it.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = path.with_name(f"{path.name}.owner")  # a separate file, because others may not be able to read a locked one
    lock = FileLock(path, timeout=wait_s)
    try:
        lock.acquire()
    except Timeout as error:
        raise LockedError(
            f"{what}: in use by {_holder(owner)}; wait until that process has ended (lock: {path})"
        ) from error
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        owner.write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            owner.unlink()
        lock.release()


def _holder(owner: Path) -> str:
    try:
        holder = json.loads(owner.read_text(encoding="utf-8"))
        seconds = max(0.0, time.time() - holder["since"])
        return f"process {holder['pid']} on {holder['host']} for {seconds:.0f} s"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has just taken the lock
