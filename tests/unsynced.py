"""What imports this waits for no disk, and copies MLflow's empty database instead of making one each time."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import tempfile
from pathlib import Path

import sqlalchemy
from mlflow.store.db import utils
from mlflow.utils import requirements_utils

logging.getLogger("mlflow").setLevel(logging.WARNING)
os.fsync = lambda _: None  # no test cuts the power


@sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "connect")
def _unsynced(connection, _):
    if isinstance(connection, sqlite3.Connection):
        with contextlib.suppress(sqlite3.DatabaseError):  # a damaged one, which the first query finds out
            connection.execute("PRAGMA synchronous=OFF")


make_tables = utils._initialize_tables  # all migrations, for seconds


def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mlflow.db")
        engine = sqlalchemy.create_engine(f"sqlite:///{path}")
        make_tables(engine)
        engine.dispose()
        return path.read_bytes()


GIVEN = os.environ.get("EMPTY_DATABASE")  # of the process that started this one
EMPTY = Path(GIVEN).read_bytes() if GIVEN else _empty_database()


def _copy_tables(engine) -> None:
    path = Path(engine.url.database or "")  # of SQLite, a file that has just been made
    path.write_bytes(EMPTY) if path.is_file() and path.stat().st_size == 0 else make_tables(engine)


utils._initialize_tables = _copy_tables
utils._get_latest_schema_revision = functools.cache(utils._get_latest_schema_revision)  # which reads all migrations
requirements_utils._PACKAGES_TO_MODULES = {}  # for which it reads the files of all installed packages, for a second
requirements_utils._init_packages_to_modules_map = lambda: None
