"""API keys: a file of their hashes, which `seqrec keys` writes and the service reads again whenever it changes.

A key is 256 random bits, so a plain SHA-256 of it cannot be reversed by guessing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from seqrec.artifacts import read_json, write_json

logger = logging.getLogger(__name__)
DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Key:
    """What the file says of a key; the key itself is nowhere."""

    name: str  # of who uses it; several keys may share one, while they are exchanged
    sha256: str
    admin: bool = False  # may also delete users and change an experiment
    expires: float | None = None  # seconds UTC


def read(path: Path) -> list[Key]:
    """Return the keys of a file.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        return [Key(**entry) for entry in read_json(path)["keys"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"keys: {path} was not written by `seqrec keys`: {error}") from error


def _write(path: Path, keys: list[Key]) -> None:
    write_json(path, {"keys": [asdict(key) for key in keys]})


def add(path: Path, name: str, *, admin: bool = False, days: float = 0.0) -> str:
    """Add a key for `name` and return it; 0 `days` = it does not expire."""
    secret = secrets.token_urlsafe(32)
    key = Key(name=name, sha256=_digest(secret), admin=admin, expires=time.time() + days * DAY if days else None)
    _write(path, [*(read(path) if path.exists() else []), key])
    return secret


def expire(path: Path, name: str, *, days: float = 0.0) -> list[Key]:
    """Let the keys of `name` end in `days`, or earlier where they do already; return them as they were.

    Raises:
        ValueError: there is none.
    """
    end, keys = time.time() + days * DAY, read(path)
    own = [key for key in keys if key.name == name]
    if not own:
        known = ", ".join(sorted({key.name for key in keys})) or "none"
        raise ValueError(f"keys: {path} has no key named {name!r}; known: {known}")
    _write(path, [replace(k, expires=min(end, k.expires or end)) if k.name == name else k for k in keys])
    return own


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """The keys of a file, as it is now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys, self.changed = read(path), path.stat().st_mtime_ns

    def find(self, secret: str) -> Key | None:
        """Return what is known of a key that is valid now; all entries are compared, each in constant time."""
        self._refresh()
        digest, found = _digest(secret), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found if found and (found.expires is None or time.time() < found.expires) else None

    def _refresh(self) -> None:
        try:
            changed = self.path.stat().st_mtime_ns
            if changed != self.changed:
                self.changed = changed
                self.keys = read(self.path)
                logger.info("keys: %s was read again, %d keys", self.path, len(self.keys))
        except (OSError, ValueError) as error:
            if self.changed:
                logger.error("the previous keys remain valid: %s", error)
            self.changed = 0  # say it once; the file is read again when it is back
