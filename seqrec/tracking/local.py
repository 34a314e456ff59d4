"""A registered model in a SQLite database of MLflow, found without importing MLflow, which takes seconds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from seqrec.config import RegisterConfig
from seqrec.tracking.runs import SQLITE, tracking_uri

FILES = "artifacts"  # folder of a logged model
PREFIX = "models:/"
ALIAS = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?"
VERSION = "SELECT storage_location FROM model_versions WHERE name = ? AND version = ?"


def find(uri: str, config: RegisterConfig) -> Path | None:
    """Return the folder of `models:/NAME@ALIAS` or `models:/NAME/VERSION`; None where only MLflow can say.

    That is any other server, a database of another schema, and a model that is not there: MLflow explains it.
    """
    database = tracking_uri(config)
    if not (database.startswith(SQLITE) and uri.startswith(PREFIX) and Path(database.removeprefix(SQLITE)).is_file()):
        return None
    address = Path(database.removeprefix(SQLITE)).as_uri() + "?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            row = _row(connection, uri.removeprefix(PREFIX))
    except sqlite3.Error:
        return None
    if row is None or row[0] is None:
        return None
    folder = Path(str(row[0]).removeprefix("file://")) / FILES
    beside = folder.resolve().is_relative_to(Path(database.removeprefix(SQLITE)).resolve().parent)
    return folder if beside and folder.is_dir() else None  # elsewhere: a copied database, which MLflow's way explains


def _row(connection: sqlite3.Connection, model: str) -> tuple[str] | None:
    name, at, alias = model.partition("@")
    if not at:
        name, _, version = model.rpartition("/")
        return connection.execute(VERSION, (name, version)).fetchone()  # type: ignore[no-any-return]
    found = connection.execute(ALIAS, (name, alias)).fetchone()
    return None if found is None else connection.execute(VERSION, (name, found[0])).fetchone()
