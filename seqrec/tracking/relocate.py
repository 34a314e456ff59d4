"""Corrects the absolute paths in MLflow's database after a project was moved or copied.

This is for a SQLite file with `mlartifacts/` beside it; a server finds its artifacts by its own settings.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from seqrec.config import ConfigError, RegisterConfig
from seqrec.tracking.runs import local_path, sqlite_path, tracking_uri

logger = logging.getLogger(__name__)
COLUMNS = {  # of the tables of MLflow that hold where artifacts are
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def relocate(config: RegisterConfig) -> None:
    """Replace the old folder of a local database by its present one in all paths; keep a backup.

    Args:
        config: section `register`.

    Raises:
        ConfigError: it is no local database, or its artifacts are not beside it.
    """
    path = sqlite_path(tracking_uri(config))
    if path is None or not path.is_file():
        raise ConfigError(f"register.tracking_uri: {tracking_uri(config)} is not a SQLite file: nothing to relocate")
    new = path.parent.resolve()
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            old = _before(database, config.experiment)
            if old.resolve() == new:
                logger.info("%s: the artifacts are already beside it", path)
                return
            if not (new / "mlartifacts").is_dir():
                raise ConfigError(f"registry relocate: {new} has no mlartifacts: move or copy that folder there first")
            backup = _back_up(database, path)
            with database:
                database.execute("BEGIN IMMEDIATE")
                changed = sum(
                    _rewrite(database, table, column, old, new) for table in COLUMNS for column in COLUMNS[table]
                )
    except sqlite3.Error as error:
        raise ConfigError(f"registry relocate: {path}: {error}") from error
    logger.info("%s: %d paths changed from %s to %s; the backup is %s", path, changed, old, new, backup)


def _before(database: sqlite3.Connection, experiment: str) -> Path:
    """Return the folder that the database was in when `experiment` was made."""
    row = database.execute("SELECT artifact_location FROM experiments WHERE name = ?", [experiment]).fetchone()
    folder = None if row is None else local_path(row[0])
    if folder is None:
        raise ConfigError(f"registry relocate: experiment {experiment!r} keeps no artifacts in a local folder")
    return folder.parent


def _back_up(database: sqlite3.Connection, path: Path) -> Path:
    backup = path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}.backup")
    with contextlib.closing(sqlite3.connect(backup)) as copy:
        database.backup(copy)
    return backup


def _rewrite(database: sqlite3.Connection, table: str, column: str, old: Path, new: Path) -> int:
    """Return how many paths were moved from `old` to `new`."""
    count = 0
    for before, after in ((f"{old}/", f"{new}/"), (f"file://{old}/", f"file://{new}/")):
        done = database.execute(  # names of COLUMNS alone are put into the text
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
            [after, len(before) + 1, len(before), before],
        )
        count += done.rowcount
    return count
