"""API keys of the service: add, rotate, revoke."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.config import ConfigError
from seqrec.serving import keys as file

LONGEST = 36_500  # days


def keys(
    action: Literal["show", "add", "rotate", "revoke"],
    *,
    keys_file: Path = Path("keys.json"),
    name: str = "",
    admin: bool = False,
    days: float = 0.0,
) -> None:
    """Show or change the keys in a file; a running service reads the file again.

    Args:
        action: show, add (print a new key, this once), rotate (add a key and let the old keys of the name expire in
            --days) or revoke (disable all keys of the name at once).
        keys_file: file of the keys; it holds their hashes, not the keys themselves.
        name: who uses the key.
        admin: let the new key also read and delete a user's events, and change an experiment.
        days: days until an added key expires, 0 = never; with rotate, days until the old keys expire.

    Raises:
        ConfigError: the name is missing, or an option has no effect.
        OSError: there is no file of keys; only add makes one.
        ValueError: no key has this name.
    """
    if action == "show":
        if name or admin or days:
            raise ConfigError("--name, --admin and --days have no effect with show, which lists all keys")
        _show(keys_file)
        return
    if not name:
        raise ConfigError(f"{action} needs --name")
    if not 0 <= days <= LONGEST:
        raise ConfigError(f"--days must be from 0 to {LONGEST}, not {days}")
    if action != "add":
        file.read(keys_file)  # or it raises, before a lock file is made beside a file that does not exist
    if action == "revoke":
        if days or admin:
            raise ConfigError("--days and --admin have no effect with revoke, which disables the keys at once")
        file.expire(keys_file, name)
    else:
        change = file.add if action == "add" else file.rotate
        print(change(keys_file, name, admin=admin, days=days))


def _show(path: Path) -> None:
    table = Table("name", "may", "expires")
    for key in file.read(path):
        end = ""
        if key.expires is not None:
            end = datetime.datetime.fromtimestamp(key.expires, datetime.UTC).isoformat(" ", "minutes")
        table.add_row(escape(key.name), "all" if key.admin else "ask, send events", end)
    Console().print(table)
