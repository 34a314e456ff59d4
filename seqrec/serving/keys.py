"""API keys: a file of their hashes, which `seqrec keys` writes and the service reads again whenever it changes.

A key is 256 random bits, so a plain SHA-256 of it cannot be reversed by guessing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from seqrec.artifacts import read_json, write_json
from seqrec.config import parse
from seqrec.locks import locked

logger = logging.getLogger(__name__)
DAY = 86_400.0
LATEST = 253_402_214_400.0  # seconds UTC: the last day of the year 9999
DIGEST = re.compile("[0-9a-f]{64}")
WAIT_S = 10.0  # for another process that changes the file


@dataclass(frozen=True, kw_only=True)
class Key:
    """What the file says of a key; the key itself is nowhere."""

    name: str  # of who uses it; several keys may share one, while they are exchanged
    sha256: str
    admin: bool = False  # may also read and delete users, and change an experiment
    expires: float | None = None  # seconds UTC

    def __post_init__(self) -> None:
        if not DIGEST.fullmatch(self.sha256):
            raise ValueError(f"sha256: {self.sha256!r:.80} is not a SHA-256")
        if self.expires is not None and not 0 <= self.expires < LATEST:
            raise ValueError(f"expires: {self.expires} is not a time")


def read(path: Path) -> list[Key]:
    """Return the keys of a file.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    content = read_json(path).get("keys")
    try:
        if not isinstance(content, list):
            raise ValueError("it holds no list of keys")
        return [parse(Key, entry, f"key {number}") for number, entry in enumerate(content, start=1)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by `seqrec keys`: {error}") from error


def add(path: Path, name: str, *, admin: bool = False, days: float = 0.0) -> str:
    """Add a key for `name` and return it; 0 `days` = it does not expire."""
    with _changed(path) as keys:
        return _add(keys, name, admin, days)


def expire(path: Path, name: str) -> None:
    """Let the keys of `name` end now.

    Raises:
        ValueError: there is none.
    """
    with _changed(path) as keys:
        _expire(keys, name, 0.0)


def rotate(path: Path, name: str, *, admin: bool = False, days: float = 0.0) -> str:
    """Add a key for `name` that may do what the valid old ones may, and let these end in `days`; return the new key.

    The new key does not expire.

    Raises:
        ValueError: there is no valid old one.
    """
    with _changed(path) as keys:
        valid = [key for key in _expire(keys, name, days) if key.expires is None or key.expires > time.time()]
        if not valid:
            raise ValueError(f"all keys of {name!r} have expired or were revoked: add a new one")
        return _add(keys, name, admin or any(key.admin for key in valid), 0.0)


@contextmanager
def _changed(path: Path) -> Iterator[list[Key]]:
    """Yield the keys of a file and write what the block makes of them; other processes wait until that is done."""
    with locked(path.with_name(f"{path.name}.lock"), f"keys: {path}", WAIT_S):
        keys = read(path) if path.exists() else []
        yield keys
        write_json(path, {"keys": [asdict(key) for key in keys]})


def _add(keys: list[Key], name: str, admin: bool, days: float) -> str:
    secret = secrets.token_urlsafe(32)
    expires = time.time() + days * DAY if days else None
    keys.append(Key(name=name, sha256=_digest(secret), admin=admin, expires=expires))
    return secret


def _expire(keys: list[Key], name: str, days: float) -> list[Key]:
    """Let the keys of `name` end in `days`, or earlier where they do already; return them as they were."""
    old = [key for key in keys if key.name == name]
    if not old:
        known = ", ".join(sorted({key.name for key in keys})) or "none"
        raise ValueError(f"no key is named {name!r}; known: {known}")
    end = time.time() + days * DAY
    keys[:] = [
        replace(k, expires=end if k.expires is None else min(end, k.expires)) if k.name == name else k for k in keys
    ]
    return old


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """The keys of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, _version(path)  # before it is read: a change in between is noticed later
        self.keys = read(path)

    def find(self, secret: str) -> Key | None:
        """Return what is known of a key that is valid now; all entries are compared, each in constant time."""
        self._refresh()
        digest, found = _digest(secret), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found if found and (found.expires is None or time.time() < found.expires) else None

    def _refresh(self) -> None:
        before = self.version
        try:
            self.version = _version(self.path)
            if self.version != before:
                self.keys = read(self.path)
                logger.info("keys: %s was read again and holds %d keys", self.path, len(self.keys))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self.version = ()  # it is read again when it is back
            if self.version != before:  # say it once
                logger.error("the keys cannot be read again, so the previous ones remain valid: %s", error)


def _version(path: Path) -> tuple[int, ...]:
    """Return what differs between two contents of a file: its time alone is the same for two changes at once."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size
