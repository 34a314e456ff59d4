"""The store: what users did, and what they were shown. SQLite or PostgreSQL, by an SQLAlchemy URL.

Events that training has seen (`seqrec events import`) and those sent since live in one table, so a user's history is
one query. The same user, item and second is one event, wherever it came from.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from seqrec.artifacts import open_table, write_table
from seqrec.config import ConfigError
from seqrec.data import stores
from seqrec.redaction import redacted
from seqrec.tracking.runs import advice_on, first_line, is_cut_short

logger = logging.getLogger(__name__)
VARIABLE = "SEQREC_STORE"  # of the environment: the URL, which may hold a password
EXPECTED = f"expected sqlite:///FILE or postgresql+psycopg://... as --store or {VARIABLE}"
HIDE, POSITIVE = "hide", ("view", "buy")  # kinds of events
KINDS = (*POSITIVE, HIDE)
DAY = 86_400.0
OVERLAP_S = 3_600.0  # of received events that are collected again: transactions may end in another order
NEWEST_EVENTS = 1_000  # events of a user that are looked up, and items that the user hides
ROWS_AT_ONCE = 10_000  # of an import or a dump
EXPIRED_AT_ONCE = 1_000  # events, and answers with their items, in a transaction that others wait for
PAUSE_S = 0.02  # between two of these
TEXT = (pa.string(), pa.large_string())
TYPES = {"user_id": TEXT, "item_id": TEXT, "timestamp": (pa.int64(),)}  # of a table that `ingest` writes
COLUMNS = [*TYPES]
IMPORTED = "import:"  # how the ids of imported events begin
CAUTION = 10  # events added to both counts of a trend, so that few events are none
PATIENCE_S = 2.0  # in which tables are tried to be made
LOCKED_MS = 10_000  # for which a statement waits while another process writes into a SQLite file
NO_TABLE = "42P01"  # PostgreSQL's code for a table that is not there
TABLES_LOCK = 0x5E09EC  # number of PostgreSQL's lock for processes that make the tables
DAMAGE = ("not a database", "malformed")  # words of SQLite's errors about a file that is cut short or altered

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
    sa.Index("events_by_time", "at", "kind", "item", "user"),  # with all that a trend reads
)
HIDDEN = EVENTS.c.kind == sa.literal_column(f"'{HIDE}'")  # a parameter would not find the index
sa.Index("hidden_of_user", EVENTS.c.user, EVENTS.c.at, sqlite_where=HIDDEN, postgresql_where=HIDDEN)

NEWEST = (  # of one user: a statement for several is slower, and `limit` would leave out whoever did little
    sa.select(EVENTS.c.item, EVENTS.c.kind, EVENTS.c.at)
    .where(EVENTS.c.user == sa.bindparam("user"))
    .order_by(EVENTS.c.at.desc(), EVENTS.c.number.desc())
    .limit(sa.bindparam("most"))
)
NEWEST_HIDDEN = NEWEST.where(HIDDEN)

ANSWERS = sa.Table(
    "answers",
    TABLES,
    sa.Column("recommendation_id", sa.Text, primary_key=True),
    sa.Column("user", sa.Text, index=True),
    sa.Column("version", sa.Text, nullable=False),  # of the model
    sa.Column("at", sa.Double, nullable=False, index=True),  # seconds UTC
)
IMPRESSIONS = sa.Table(
    "impressions",
    TABLES,
    sa.Column("recommendation_id", sa.Text, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),  # 1 = first
    sa.Column("item", sa.Text, nullable=False),
)


class StoreError(OSError):
    """The store cannot do what it was asked; the message names it and the next step, and nothing of the request."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A list that a user was shown."""

    recommendation_id: str
    user: str | None
    version: str
    items: Sequence[str]  # best first
    at: float  # seconds UTC


@dataclass(frozen=True)
class Clicks:
    """How often a user was shown a list of a version, and chose an item of it."""

    version: str
    user: str
    answers: int
    clicked: int  # answers of which an item was viewed or bought at least once


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
class UserHistory:
    """What is known of a user."""

    items: list[str] = field(default_factory=list)  # oldest first
    times: list[float] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)  # items that the user wants to see no more


def store_url(url: str) -> str:
    """Return the URL of the store: as given, or as the environment has it; empty where there is none."""
    return (url or os.environ.get(VARIABLE, "")).strip()  # a Secret made from a file ends with a line break


class Store:
    """Events in a database; safe to use from several threads and processes."""

    def __init__(self, url: str, patience_s: float | None = None) -> None:
        """Connect, and make the tables that are missing.

        An answer of PostgreSQL is waited for `patience_s` seconds; None: for ever.

        Raises:
            ConfigError: the URL is of no kind of database that is supported, or other software made a table in it.
            StoreError: the database does not answer.
        """
        try:
            self.engine = sa.create_engine(url, hide_parameters=True, pool_pre_ping=True)  # it may restart
        except (sa.exc.ArgumentError, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(f"store: {redacted(str(error))}; {EXPECTED}") from error
        self._url = redacted(self.engine.url.render_as_string(hide_password=True))
        kinds = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        if self.engine.dialect.name not in kinds:
            raise ConfigError(f"store: {self.engine.dialect.name} is not supported; use SQLite or PostgreSQL")
        self._insert: Any = kinds[self.engine.dialect.name]
        self._sqlite = self.engine.dialect.name == "sqlite"
        self._file: tuple[int, int] | None = None  # which SQLite file it is, once there is one
        if self._sqlite:
            if self.engine.url.database in (None, "", ":memory:"):
                raise ConfigError(f"store: {url} names no file, so it would keep nothing; {EXPECTED}")
            sa.event.listen(self.engine, "connect", _set_up_sqlite)
        elif "@" in (self.engine.url.host or ""):
            raise ConfigError("store: the password in the URL holds a @, which must be written as %40")
        elif self.engine.dialect.driver == "psycopg":
            _set_up_postgresql(self.engine, patience_s)
        self._make_tables()

    def _make_tables(self) -> None:
        """Make the tables that are missing; a replica that starts at the same moment may be faster, so look again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self._connection() as connection:
                    if not self._sqlite:  # of several that start at the same moment, one makes them
                        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(TABLES_LOCK)))
                    self._check_tables(sa.inspect(connection))
                    TABLES.create_all(connection)
                if self._sqlite:
                    self._check_file()  # it may be new, and is known from now on
                return
            except ConfigError:
                raise
            except (TypeError, ValueError) as error:  # an option of the URL that the driver does not take
                raise ConfigError(f"store: {redacted(str(error))}; {EXPECTED}") from error
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _check_tables(self, database: sa.Inspector) -> None:
        """Raise ConfigError if a table has the name, but not the columns, of one of ours."""
        for table in filter(database.has_table, TABLES.tables):
            found = {column["name"] for column in database.get_columns(table)}
            if missing := [column.name for column in TABLES.tables[table].columns if column.name not in found]:
                raise ConfigError(
                    f"store: the table {table} in {self._url} was made by other software, as it has no column "
                    f"{missing[0]}; name another database with --store or {VARIABLE}"
                )

    @contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction.

        Raises:
            StoreError: the database does not answer, or refuses.
        """
        try:
            if self._sqlite:
                self._check_file()
            with self.engine.begin() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(self._explained(error)) from None  # its text may hold users and items
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"store: {self._url}: {error.strerror}") from None

    def _check_file(self) -> None:
        """Raise StoreError if the SQLite file is cut short or gone; drop the connections if it is another one.

        Whoever has a file open may write into it, and lose the events, after it was removed or replaced.
        """
        file = Path(self.engine.url.database or "")
        if is_cut_short(file):
            raise StoreError(self._damaged())
        found = (file.stat().st_dev, file.stat().st_ino) if file.is_file() else None
        if found is None and self._file is not None:
            raise StoreError(
                f"store: {self._url}: the file is gone: put it back, or start the service again, which creates one"
            )
        if found != self._file:
            self.engine.dispose()
            self._file = found

    def _damaged(self) -> str:
        return f"store: {self._url} is damaged: restore it from a backup, or remove it with all its events"

    def _explained(self, error: sa.exc.SQLAlchemyError) -> str:
        cause = getattr(error, "orig", None) or error
        if any(words in str(cause) for words in DAMAGE):
            return self._damaged()
        if "no such table" in str(cause) or getattr(cause, "sqlstate", None) == NO_TABLE:
            return f"store: {self._url} lacks a table: start the service again, which creates it"
        if isinstance(error, sa.exc.DataError | sa.exc.IntegrityError):  # the database quotes the value
            return f"store: {self._url} refused a value ({type(cause).__name__})"
        advice = advice_on(cause) or f"{first_line(cause)}; check --store or {VARIABLE}, and that the database runs"
        return f"store: {self._url}: {advice}"

    def add(self, events: Sequence[Event]) -> int:
        """Store the events that are new, in their order; return how many are."""
        received = time.time()
        if not events:
            return 0
        rows = [{**vars(event), "received": received} for event in events]
        insert = self._insert(EVENTS).values(rows).on_conflict_do_nothing().returning(EVENTS.c.number)
        with self._connection() as connection:
            return len(connection.execute(insert).all())

    def histories(self, users: Collection[str], longest: int = 0) -> dict[str, UserHistory]:
        """Return each user's history, which may be empty: the newest `NEWEST_EVENTS`, or `longest` if that is more."""
        with self._connection() as connection:
            return {user: _history(connection, user, max(NEWEST_EVENTS, longest)) for user in users}

    def forget(self, user: str) -> dict[str, int]:
        """Delete what is known of a user; return how many rows that were, by table."""
        if "\0" in user:
            return {"events": 0, "answers": 0}
        return self._delete(EVENTS.c.user == user, ANSWERS.c.user == user)

    def expire(self, days: float) -> int:
        """Delete what was received or shown more than `days` ago; return the number of events and answers."""
        end, deleted = time.time() - days * DAY, 0
        old = sa.select(EVENTS.c.number).where(EVENTS.c.received < end).limit(EXPIRED_AT_ONCE)
        shown = sa.select(ANSWERS.c.recommendation_id).where(ANSWERS.c.at < end).limit(EXPIRED_AT_ONCE)
        while True:
            with self._connection() as connection:
                events, answers = (connection.scalars(rows).all() for rows in (old, shown))
            if not events and not answers:
                return deleted
            found = self._delete(EVENTS.c.number.in_(events), ANSWERS.c.recommendation_id.in_(answers))
            deleted += sum(found.values())
            time.sleep(PAUSE_S)  # others may write in between

    def _delete(self, events: sa.ColumnElement[bool], answers: sa.ColumnElement[bool]) -> dict[str, int]:
        shown = sa.delete(ANSWERS).where(answers).returning(ANSWERS.c.recommendation_id)
        with self._connection() as connection:
            own = connection.scalars(shown).all()  # what another process writes meanwhile keeps its items
            for first in range(0, len(own), EXPIRED_AT_ONCE):
                some = IMPRESSIONS.c.recommendation_id.in_(own[first : first + EXPIRED_AT_ONCE])
                connection.execute(sa.delete(IMPRESSIONS).where(some))
            return {"events": connection.execute(sa.delete(EVENTS).where(events)).rowcount, "answers": len(own)}

    def show(self, lists: Sequence[Shown]) -> None:
        """Store what was shown, each item with its position."""
        answers = [{name: value for name, value in vars(shown).items() if name != "items"} for shown in lists]
        impressions = [
            {"recommendation_id": shown.recommendation_id, "position": position, "item": item}
            for shown in lists
            for position, item in enumerate(shown.items, start=1)
        ]
        with self._connection() as connection:
            for table, rows in ((ANSWERS, answers), (IMPRESSIONS, impressions)):
                if rows:
                    connection.execute(sa.insert(table), rows)

    def clicks(self, first: str, second: str) -> list[Clicks]:
        """Return, for each user, what became of the answers of two versions since both have been served.

        An answer counts as clicked if an event of the same user names it and one of its items. Answers without a user
        are left out.
        """
        both = ANSWERS.c.user.is_not(None), ANSWERS.c.version.in_([first, second])
        began = sa.select(sa.func.min(ANSWERS.c.at)).where(*both)
        began = began.group_by(ANSWERS.c.version).order_by(sa.func.min(ANSWERS.c.at).desc()).limit(1)
        clicked = (
            sa.select(EVENTS.c.recommendation_id, EVENTS.c.user)
            .join(
                IMPRESSIONS,
                (IMPRESSIONS.c.recommendation_id == EVENTS.c.recommendation_id) & (IMPRESSIONS.c.item == EVENTS.c.item),
            )
            .where(EVENTS.c.kind.in_(POSITIVE))
            .distinct()
            .subquery()
        )
        same = (clicked.c.recommendation_id == ANSWERS.c.recommendation_id) & (clicked.c.user == ANSWERS.c.user)
        chosen = (
            sa.select(ANSWERS.c.version, ANSWERS.c.user, sa.func.count(), sa.func.count(clicked.c.recommendation_id))
            .join(clicked, same, isouter=True)
            .where(*both, ANSWERS.c.at >= began.scalar_subquery())
            .group_by(ANSWERS.c.version, ANSWERS.c.user)
        )
        with self._connection() as connection:
            return [Clicks(*row) for row in connection.execute(chosen)]

    def trending(self, days: float, k: int, now: float) -> list[tuple[str, float]]:
        """Return the items that gained most within `days`, and by how much: views and buys against the days before.

        That is (n + CAUTION) / (m + CAUTION), of n events in the `days` before `now`, and m in as many before these.
        """
        began = now - days * DAY
        within = EVENTS.c.kind.in_(POSITIVE), EVENTS.c.at > began - days * DAY, EVENTS.c.at <= now
        latest = sa.func.max(EVENTS.c.at).label("at")
        events = sa.select(EVENTS.c.item, latest).where(*within).group_by(*self._once()).subquery()
        recent = sa.func.sum(sa.case((events.c.at > began, 1), else_=0))
        gain = (recent + float(CAUTION)) / (sa.func.count() - recent + CAUTION)
        item = events.c.item if self._sqlite else sa.collate(events.c.item, "C")  # by bytes, as SQLite does
        chosen = (
            sa.select(events.c.item, gain)
            .group_by(events.c.item)
            .having(recent > 0)
            .order_by(gain.desc(), recent.desc(), item)
            .limit(k)
        )
        with self._connection() as connection:
            return [(item, float(value)) for item, value in connection.execute(chosen)]

    def seed(self, interactions: Path) -> int:
        """Add the events of a table that `ingest` wrote; those added before are left out. Return how many are new.

        Raises:
            ValueError: the table lacks a column, or one has another type or empty values; nothing is added.
        """
        insert, received = self._insert(EVENTS).on_conflict_do_nothing(), time.time()
        table = open_table(interactions)
        if not set(COLUMNS) <= set(table.schema_arrow.names):
            raise ValueError(f"--interactions: {interactions} lacks one of the columns {', '.join(COLUMNS)}")
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=COLUMNS):
            _check_columns(interactions, batch)
        before = self._number_imported()
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=COLUMNS):
            rows = zip(*batch.to_pydict().values(), strict=True)
            with self._connection() as connection:  # short, so that the service can write in between
                connection.execute(insert, [{**_imported(*row), "received": received} for row in rows])
        return self._number_imported() - before

    def _number_imported(self) -> int:
        imported = sa.select(sa.func.count()).where(EVENTS.c.event_id.startswith(IMPORTED))
        with self._connection() as connection:
            return int(connection.execute(imported).scalar_one())

    def interactions(self, kinds: Collection[str]) -> Iterator[tuple[str, str, int]]:
        """Yield user, item and second of the events of these kinds, oldest first, each once."""
        at = sa.func.min(EVENTS.c.at)
        chosen = sa.select(EVENTS.c.user, EVENTS.c.item, at).where(EVENTS.c.kind.in_(kinds)).group_by(*self._once())
        with self._connection() as connection:
            connection.execution_options(yield_per=ROWS_AT_ONCE)
            for user, item, moment in connection.execute(chosen.order_by(at, sa.func.min(EVENTS.c.number))):
                yield user, item, int(moment)

    def received(self, since: float) -> Iterator[tuple[str, str, int, float]]:
        """Yield user, item, second and time of receipt of views and buys that were received after `since`."""
        own = EVENTS.c.kind.in_(POSITIVE), EVENTS.c.received > since, EVENTS.c.event_id.not_like(f"{IMPORTED}%")
        chosen = sa.select(EVENTS.c.user, EVENTS.c.item, EVENTS.c.at, EVENTS.c.received).where(*own)
        with self._connection() as connection:
            connection.execution_options(yield_per=ROWS_AT_ONCE)
            for user, item, at, received in connection.execute(chosen.order_by(EVENTS.c.at, EVENTS.c.number)):
                yield user, item, int(at), received

    def _once(self) -> tuple[sa.ColumnElement[Any], ...]:
        """Return what to group by, so that an event that was received and later imported counts once."""
        # SQLite may lack floor; its cast cuts off, PostgreSQL's rounds
        second = sa.cast(EVENTS.c.at, sa.BigInteger) if self._sqlite else sa.func.floor(EVENTS.c.at)
        return EVENTS.c.user, EVENTS.c.item, second


def _history(connection: sa.Connection, user: str, most: int) -> UserHistory:
    past, seen = UserHistory(), set()
    if "\0" in user:  # which PostgreSQL's text cannot hold
        return past
    wanted = {"user": user, "most": most}
    past.hidden = [item for item, _, _ in reversed(connection.execute(NEWEST_HIDDEN, wanted).all())]
    for item, kind, at in reversed(connection.execute(NEWEST, wanted).all()):
        event = item, int(at)
        if kind != HIDE and event not in seen:
            seen.add(event)
            past.items.append(item)
            past.times.append(at)
    return past


def _set_up_postgresql(engine: sa.Engine, patience_s: float | None) -> None:
    """Send UTF-8, whatever the database's own encoding, and give up a server that does not answer in time.

    The limit is the client's, because a server that stands still runs no timer, while its machine keeps TCP alive.
    """
    import psycopg

    defaults: dict[str, Any] = {"client_encoding": "utf8"}
    if patience_s is not None:
        defaults["connect_timeout"] = math.ceil(patience_s)

    class Connection(psycopg.Connection[Any]):  # type: ignore[misc]
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            try:
                return super().wait(gen, interval, timeout or patience_s)
            except psycopg.OperationalError:
                if self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:  # it gave no answer
                    with suppress(psycopg.Error):  # or the server goes on with it, and holds one of its connections
                        self.cancel_safe(timeout=1.0)
                    self.pgconn.finish()
                raise

    def connect(_: Any, __: Any, arguments: Any, options: Any) -> Any:
        return Connection.connect(*arguments, **{**defaults, **options})

    sa.event.listen(engine, "do_connect", connect)


def _set_up_sqlite(connection: Any, _: Any) -> None:
    """Let readers and a writer work at the same time, and a second writer wait."""
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={LOCKED_MS}"):
        connection.execute(f"PRAGMA {setting}")


def _check_columns(path: Path, batch: pa.RecordBatch) -> None:
    for name, values in zip(COLUMNS, batch.columns, strict=True):
        if values.type not in TYPES[name] or values.null_count:
            wrong = "empty values" if values.null_count else f"the type {values.type}"
            raise ValueError(f"--interactions: {path} was not written by `ingest`: its column {name} has {wrong}")


def _imported(user: str, item: str, second: int) -> Mapping[str, Any]:
    content = hashlib.sha256(f"{len(user)}:{user}{len(item)}:{item}{second}".encode()).hexdigest()[:32]
    return {"event_id": f"{IMPORTED}{content}", "user": user, "item": item, "kind": POSITIVE[0], "at": float(second)}


def dump(store: Store, output: Path | str, kinds: Collection[str]) -> int:
    """Write the events of these kinds as a CSV file that `ingest` reads; return how many there are.

    Raises:
        ValueError: there are none; an earlier file is kept.
    """
    rows = 0
    with stores.written(output) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in store.interactions(kinds):
            writer.writerow(row)
            rows += 1
        if not rows:
            partial.unlink()
            raise ValueError(f"the store has no events of the kinds {', '.join(kinds)}: {output} was not written")
    return rows


def missing(url: str) -> Path | None:
    """Return the SQLite file of a store that does not exist yet."""
    file = Path(url.removeprefix("sqlite:///").partition("?")[0])
    return file if url.startswith("sqlite:///") and not file.is_file() else None


def collect(log: Path) -> int:
    """Add the views and buys that the store in SEQREC_STORE has received since the last call to the table `log`.

    Imported events are left out, because the source of training data has them. A call that is repeated adds nothing.

    Args:
        log: Parquet file of earlier calls; it is written if there is none. `ingest` reads it.

    Returns:
        The number of events added.

    Raises:
        ConfigError: no store is named.
        StoreError: the store does not answer.
    """
    import polars as pl  # the service needs none

    if not (url := store_url("")):
        raise ConfigError(f"ingest.events: set the variable {VARIABLE} to the URL of the event store")
    schema = {"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Int64, "received": pl.Float64}
    before = pl.read_parquet(log, glob=False) if log.is_file() else pl.DataFrame(schema=schema)
    since = before.select(pl.col("received").max().fill_null(0.0) - OVERLAP_S).item()
    if file := missing(url):
        logger.warning("%s: there is no file %s: no service has received events in it yet", VARIABLE, file)
    received = [] if file else list(Store(url).received(since))
    found = pl.DataFrame(received, schema=schema, orient="row")
    grown = pl.concat([before, found]).unique(COLUMNS, keep="first", maintain_order=True)
    write_table(log, grown.to_arrow(compat_level=pl.CompatLevel.oldest()))
    return grown.height - before.height
