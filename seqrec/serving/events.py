"""The store: what users did, and what they were shown. SQLite or PostgreSQL, by an SQLAlchemy URL.

Events that training has seen (`seqrec events import`) and those sent since live in one table, so a user's history is
one query. The same user, item and second is one event, wherever it came from.
"""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from seqrec.config import ConfigError

VARIABLE = "SEQREC_STORE"  # of the environment: the URL, which may hold a password
HIDE, POSITIVE = "hide", ("view", "buy")  # kinds of events
DAY = 86_400.0
MOST = 10_000  # newest events of a user that are looked up
BLOCK = 10_000  # rows of an import
StoreError = sa.exc.SQLAlchemyError

TABLES = sa.MetaData()
NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts up in this type alone
EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("number", NUMBER, primary_key=True),
    sa.Column("event_id", sa.Text, nullable=False, unique=True),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("item", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),  # seconds UTC
    sa.Column("recommendation_id", sa.Text, index=True),  # the answer that led to it
    sa.Column("received", sa.Double, nullable=False, index=True),  # seconds UTC
    sa.Index("events_of_user", "user", "at"),
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a user did with an item."""

    event_id: str  # the sender's; a second one with this id is ignored
    user: str
    item: str
    kind: str  # view, buy or hide
    at: float  # seconds UTC
    recommendation_id: str | None = None


@dataclass
class Past:
    """What is known of a user."""

    items: list[str] = field(default_factory=list)  # oldest first
    times: list[float] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)  # items that the user wants to see no more


def located(url: str) -> str:
    """Return the URL of the store: as given, or as the environment has it; empty where there is none."""
    return url or os.environ.get(VARIABLE, "")


class Store:
    """Events in a database; safe to use from several threads and processes."""

    def __init__(self, url: str) -> None:
        """Connect, and make the tables that are missing.

        Raises:
            ConfigError: the URL is of no kind of database that is supported.
            StoreError: the database does not answer.
        """
        try:
            self.engine = sa.create_engine(url)
        except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
            raise ConfigError(f"store: {error}; wanted is sqlite:///FILE or postgresql+psycopg://...") from error
        kinds = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        if self.engine.dialect.name not in kinds:
            raise ConfigError(f"store: {self.engine.dialect.name} is not supported, SQLite and PostgreSQL are")
        self._insert: Any = kinds[self.engine.dialect.name]
        if self.engine.dialect.name == "sqlite":
            sa.event.listen(self.engine, "connect", _set_up_sqlite)
        TABLES.create_all(self.engine)

    def add(self, events: Sequence[Event]) -> int:
        """Store the events that are new, in their order; return how many are."""
        received = time.time()
        rows = [{**vars(event), "received": received} for event in events]
        if not rows:
            return 0
        with self.engine.begin() as connection:
            return int(connection.execute(self._insert(EVENTS).values(rows).on_conflict_do_nothing()).rowcount)

    def pasts(self, users: Collection[str]) -> dict[str, Past]:
        """Return the past of each user, of whom nothing may be known."""
        found = {user: Past() for user in users}
        if not found:
            return found
        chosen = sa.select(EVENTS.c.user, EVENTS.c.item, EVENTS.c.kind, EVENTS.c.at).where(
            EVENTS.c.user.in_([user for user in found if "\0" not in user])  # which PostgreSQL's text cannot hold
        )
        newest = chosen.order_by(EVENTS.c.at.desc(), EVENTS.c.number.desc()).limit(MOST * len(found))
        with self.engine.connect() as connection:
            rows = connection.execute(newest).all()
        seen = set()
        for user, item, kind, at in reversed(rows):
            past, event = found[user], (user, item, int(at))
            if kind == HIDE:
                past.hidden.append(item)
            elif event not in seen:
                seen.add(event)
                past.items.append(item)
                past.times.append(at)
        return found

    def forget(self, user: str) -> dict[str, int]:
        """Delete what is known of a user; return how many rows that were, by table."""
        if "\0" in user:
            return {"events": 0}
        with self.engine.begin() as connection:
            return {"events": connection.execute(sa.delete(EVENTS).where(EVENTS.c.user == user)).rowcount}

    def expire(self, days: float) -> int:
        """Delete what was received more than `days` ago; return the number of events."""
        with self.engine.begin() as connection:
            return connection.execute(sa.delete(EVENTS).where(EVENTS.c.received < time.time() - days * DAY)).rowcount

    def seed(self, interactions: Path) -> int:
        """Add the events of a table that `ingest` wrote; those added before are left out. Return how many are new."""
        insert, received = self._insert(EVENTS).on_conflict_do_nothing(), time.time()
        with self.engine.begin() as connection:
            before = connection.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one()
            for batch in pq.ParquetFile(interactions).iter_batches(BLOCK, columns=["user_id", "item_id", "timestamp"]):
                rows = zip(*batch.to_pydict().values(), strict=True)
                connection.execute(insert, [{**_imported(*row), "received": received} for row in rows])
            return int(connection.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one() - before)

    def interactions(self, kinds: Collection[str]) -> Iterator[tuple[str, str, int]]:
        """Yield user, item and second of the events of these kinds, oldest first."""
        chosen = sa.select(EVENTS.c.user, EVENTS.c.item, EVENTS.c.at).where(EVENTS.c.kind.in_(kinds))
        with self.engine.connect().execution_options(yield_per=BLOCK) as connection:
            for user, item, at in connection.execute(chosen.order_by(EVENTS.c.at, EVENTS.c.number)):
                yield user, item, int(at)


def _set_up_sqlite(connection: Any, _: Any) -> None:
    """Let readers and a writer work at the same time, and a second writer wait."""
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {setting}")


def _imported(user: str, item: str, second: int) -> Mapping[str, Any]:
    content = hashlib.sha256(f"{len(user)}:{user}{len(item)}:{item}{second}".encode()).hexdigest()[:32]
    return {"event_id": f"import:{content}", "user": user, "item": item, "kind": POSITIVE[0], "at": float(second)}


def dump(store: Store, output: Path, kinds: Collection[str] = POSITIVE) -> int:
    """Write the events of these kinds as a CSV file that `ingest` reads; return how many there are."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial, rows = output.with_name(output.name + ".partial"), 0
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["user_id", "item_id", "timestamp"])
        for row in store.interactions(kinds):
            writer.writerow(row)
            rows += 1
    partial.replace(output)
    return rows
