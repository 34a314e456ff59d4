"""The store of events: histories by user, deletion, expiry, and the way of an event back to training."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import sqlite3
import threading
import time
import traceback
from datetime import datetime
from unittest import mock

import polars as pl
import pytest
import requests
import sqlalchemy as sa
from fastapi import HTTPException
from support import save, service, write_interactions

from seqrec.__main__ import main
from seqrec.config import ConfigError
from seqrec.serving import events as module
from seqrec.serving.async_store import AsyncStore, Kept
from seqrec.serving.events import DAY, Event, Shown, Store, StoreError, UserHistory, dump
from seqrec.serving.recommender import Recommender, Request


@pytest.fixture(scope="module")
def timed(prepared, tmp_path_factory):
    """A model that reads times."""
    return Recommender.load(save("tisasrec", prepared, tmp_path_factory.mktemp("served"), model="tisasrec"))


def event(number, user="u", item="i1", kind="view", at=None):
    return Event(event_id=str(number), user=user, item=item, kind=kind, at=float(number if at is None else at))


def test_a_past_is_in_the_order_of_its_times_whatever_came_first(store):
    assert store.add([event(3, item="c"), event(1, item="a"), event(2, item="b", kind="buy"), event(4, user="v")]) == 4
    assert store.add([event(5, item="x", at=1)]) == 1  # as early as a, but sent later
    assert store.add([event(6, item="d", kind="hide"), event(3, item="other")]) == 1  # an id that is known

    past = store.histories({"u", "nobody", "\0"})
    assert (past["u"].items, past["u"].times, past["u"].hidden) == (["a", "x", "b", "c"], [1, 1, 2, 3], ["d"])
    assert past["nobody"].items == past["\0"].items == []


def test_no_event_is_written_into_a_file_that_was_removed_or_replaced(store, tmp_path):
    file, away = tmp_path / "events.db", tmp_path / "away.db"
    store.add([event(1, item="a")])
    file.rename(away)
    with pytest.raises(StoreError, match="the file is gone: put it back"):
        store.add([event(2, item="b")])
    assert not file.exists()

    away.rename(file)
    store.add([event(2, item="c")])
    assert store.histories(["u"])["u"].items == ["a", "c"]

    other = Store(f"sqlite:///{away}")
    other.add([event(3, item="d")])
    other.engine.dispose()
    for part in tmp_path.glob("events.db*"):
        part.unlink()
    away.rename(file)
    assert store.histories(["u"])["u"].items == ["d"]


def test_no_event_is_written_into_a_new_file_that_was_removed_before_the_first_one(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/new.db")
    (tmp_path / "new.db").unlink()
    with pytest.raises(StoreError, match="the file is gone: put it back"):
        store.add([event(1)])


def test_the_newest_events_are_kept_where_there_are_too_many(store, monkeypatch):
    monkeypatch.setattr(module, "NEWEST_EVENTS", 3)
    store.add([event(number, item=f"i{number}") for number in range(9)])
    store.add([event(f"h{number}", item=f"h{number}", kind="hide", at=number) for number in range(4)])
    store.add([event("old", user="v", item="j", at=0)])

    past = store.histories(["u", "v"])
    assert (past["u"].items, past["v"].items) == (["i6", "i7", "i8"], ["j"])
    assert past["u"].hidden == ["h1", "h2", "h3"]  # however many events came after them
    assert store.histories(["u"], longest=4)["u"].items == ["i5", "i6", "i7", "i8"]  # for a model that reads more


def test_users_who_ask_during_a_lookup_are_looked_up_together_after_it():
    calls, store = [], mock.Mock()

    def look_up(users, longest):
        calls.append(set(users))
        time.sleep(0.05)
        return {user: UserHistory(items=[user, str(len(calls))]) for user in users}

    async def ask():
        histories, store.histories = AsyncStore(store, None), look_up
        first = asyncio.create_task(histories.histories({"a"}, 0))
        while not calls:
            await asyncio.sleep(0.001)
        later = [asyncio.create_task(histories.histories({user}, 0)) for user in "abcd"]
        await asyncio.sleep(0.001)
        later[1].cancel()  # whoever has gone leaves the others their answer
        found = await asyncio.gather(first, *later, return_exceptions=True)
        store.histories = mock.Mock(side_effect=StoreError("down"))
        failed = await asyncio.gather(*(histories.histories({user}, 0) for user in "ef"), return_exceptions=True)
        store.histories.assert_called_once_with({"e", "f"}, 0)
        return found, failed

    (first, again, gone, *others), failed = asyncio.run(ask())

    assert calls == [{"a"}, {"a", "b", "c", "d"}]
    assert (first["a"].items, again["a"].items) == (["a", "1"], ["a", "2"])  # never what was read before it asked
    assert isinstance(gone, asyncio.CancelledError)
    assert [found[user].items for found, user in zip(others, "cd", strict=True)] == [["c", "2"], ["d", "2"]]
    assert all(isinstance(error, StoreError) for error in failed)


def test_the_error_of_a_lookup_that_nobody_waits_for_any_more_is_not_logged(caplog):
    """As where a database stands still: the request has got a 504 long before."""
    began, go, store = threading.Event(), threading.Event(), mock.Mock()

    def fail(users, longest):
        began.set()
        go.wait(10)
        raise StoreError("down")

    async def ask():
        histories, store.histories = AsyncStore(store, None), fail
        asking = asyncio.create_task(histories.histories({"a"}, 0))
        await asyncio.to_thread(began.wait, 10)
        asking.cancel()
        go.set()
        await asyncio.gather(asking, return_exceptions=True)
        async with histories.looking:  # until it has ended
            pass
        await asyncio.sleep(0)

    asyncio.run(ask())
    gc.collect()

    assert caplog.text == ""


def test_training_data_seeds_histories_once(store, tmp_path, monkeypatch):
    rows = [("u", "i1", 100), ("u", "i2", 200), ("u", "i2", 300), ("v", "i9", 150)]
    write_interactions(tmp_path, rows)
    store.add([event("live", item="i3", at=250.5), event("seen by training too", item="i2", at=300.7)])

    monkeypatch.setattr(module, "ROWS_AT_ONCE", 1)
    imported = module._imported

    def meanwhile(*row):  # the service writes between two parts of the import
        store.add([event(f"meanwhile {row[2]}", user="w", kind="hide", at=1)])
        return imported(*row)

    monkeypatch.setattr(module, "_imported", meanwhile)

    assert store.seed(tmp_path / "interactions.parquet") == 4
    assert store.seed(tmp_path / "interactions.parquet") == 0
    past = store.histories(["u"])["u"]
    assert past.items == ["i1", "i2", "i3", "i2"]  # the last one once, though two sources have it
    assert [*store.interactions(["view"])] == [*rows[:1], ("v", "i9", 150), rows[1], ("u", "i3", 250), rows[2]]
    assert store.trending(1, 9, 400.0) == [("i2", 1.2), ("i1", 1.1), ("i3", 1.1), ("i9", 1.1)]


def test_what_the_store_receives_is_collected_once(store, tmp_path, monkeypatch, caplog):
    log = tmp_path / "log.parquet"
    with pytest.raises(ConfigError, match="set the variable SEQREC_STORE to the URL of the event store"):
        module.collect(log)
    monkeypatch.setenv(module.VARIABLE, f"sqlite:///{tmp_path}/missing.db")
    assert module.collect(log) == 0
    assert not (tmp_path / "missing.db").exists()
    assert "SEQREC_STORE: there is no file" in caplog.text
    monkeypatch.setenv(module.VARIABLE, f"sqlite:///{tmp_path}/events.db")
    assert module.collect(log) == 0
    assert pl.read_parquet(log).is_empty()

    write_interactions(tmp_path, [("u", "i0", 50)])  # of the source of training data
    store.seed(tmp_path / "interactions.parquet")
    store.add([event(1, at=200.7), event(2, kind="hide"), event("the same", at=200.2), event(3, user="v", kind="buy")])
    assert module.collect(log) == 2
    assert module.collect(log) == 0
    moment = time.time() - module.OVERLAP_S / 2
    monkeypatch.setattr(module.time, "time", lambda: moment)  # of a transaction that began before, and ends now
    store.add([event("late", item="i2", at=5)])
    store.forget("v")
    assert module.collect(log) == 1
    rows = pl.read_parquet(log).select(module.COLUMNS).rows()
    assert rows == [("v", "i1", 3), ("u", "i1", 200), ("u", "i2", 5)]


def test_what_is_old_or_of_a_user_is_deleted(store, monkeypatch):
    store.add([event(1), event(2, user="v")])
    assert store.forget("u") == {"events": 1, "answers": 0}
    assert store.forget("\0") == store.forget("u") == {"events": 0, "answers": 0}
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3 * DAY)
    store.add([event(3)])

    monkeypatch.setattr(module, "EXPIRED_AT_ONCE", 1)
    assert store.expire(2) == 1
    assert list(store.interactions(["view"])) == [("u", "i1", 3)]
    monkeypatch.setattr(module.time, "time", lambda: now + 9 * DAY)
    store.add([event(4), event(5)])
    monkeypatch.setattr(module.time, "time", lambda: now + 19 * DAY)
    assert store.expire(2) == 3


@pytest.mark.parametrize("days", [3.5, 40.0])
def test_a_trend_is_the_gain_over_as_many_days_before(store, recommender, days):
    now, draw = time.time(), random.Random(0)
    ages = [(f"i{draw.randrange(5)}", draw.choice(["view", "view", "hide"]), draw.uniform(-0.5, 9)) for _ in range(900)]
    store.add([event(n, item=item, kind=kind, at=now - age * DAY) for n, (item, kind, age) in enumerate(ages)])

    def count(item, low, high):
        return sum(one == item and kind == "view" and low <= age < high for one, kind, age in ages)

    gains = {f"i{n}": (count(f"i{n}", 0, days) + 10) / (count(f"i{n}", days, 2 * days) + 10) for n in range(5)}
    expected = sorted(gains.items(), key=lambda one: -one[1])
    assert store.trending(days, 3, now) == [(item, pytest.approx(gain)) for item, gain in expected[:3]]
    with service(recommender, store=store) as address:
        answer = requests.get(f"{address}/trending?k=2&days={days}", timeout=10).json()
        assert requests.get(f"{address}/trending?days=0", timeout=10).status_code == 422
    assert answer["items"] == [item for item, _ in expected[:2]]
    assert (len(answer["titles"]), answer["version"]) == (2, "7")


def test_trends_are_counted_one_at_a_time_and_kept():
    """Whoever asks for what is being counted waits for it; a window that is not known yet is refused meanwhile."""
    counted, go = [], threading.Event()

    def count(days):
        counted.append(days)
        go.wait(10)
        return days, len(counted)

    async def ask():
        kept = Kept(1.0)
        first = [asyncio.create_task(kept.get(7, lambda: count(7))) for _ in range(9)]
        while not counted:
            await asyncio.sleep(0.001)
        first[0].cancel()  # whoever has gone leaves the others their answer
        with pytest.raises(HTTPException) as busy:
            await kept.get(8, lambda: count(8))
        go.set()
        found = set((await asyncio.gather(*first, return_exceptions=True))[1:])
        again = await kept.get(7, lambda: count(7))
        kept.known[7] = kept.known[7][0] - 2, kept.known[7][1]  # two seconds later
        go.clear()
        while_counted = [await kept.get(7, lambda: count(7)) for _ in range(3)]  # too old, and yet at once
        go.set()
        while kept.working:
            await asyncio.sleep(0.001)
        return busy.value.status_code, found, again, while_counted, await kept.get(7, lambda: count(7))

    busy, found, again, while_counted, newest = asyncio.run(ask())

    assert (busy, found, again, while_counted, newest) == (503, {(7, 1)}, (7, 1), [(7, 1)] * 3, (7, 2))
    assert counted == [7, 7]


def test_answers_by_user_are_those_of_the_history_and_follow_events(timed, store):
    recommender, now = timed, time.time()
    with service(timed, store=store) as address:

        def post(path, **body):
            return requests.post(address + path, json=body, timeout=10)

        def ask(**body):
            return post("/recommend", **body)

        def send(*events):
            return post("/events", events=events)

        assert ask(user="anna").json()["source"] == "popularity"
        assert "those of imported events" in send({"event_id": "Import:1", "user": "a", "item": "i1"}).text
        first = {"event_id": "1", "user": "anna", "item": "i1", "at": now - 500_000}
        second = {"event_id": "2", "user": " anna", "item": "i2\t", "kind": "buy", "at": now}
        assert send(first, second).json() == {"stored": 2, "known": 0}
        assert send(second, {**second, "event_id": "3", "user": "ben"}).json() == {"stored": 1, "known": 1}
        by_user = ask(user="anna ").json()
        expected = recommender.recommend(["i1", "i2"], 10, times=[0.0, 500_000.0], user="anna")
        assert by_user["items"] == expected.items
        assert by_user["scores"] == pytest.approx(expected.scores, abs=1e-5)
        assert by_user["notes"] == []  # the times are known
        past = {"history": ["i3", "i1", "i2"], "times": [0.0, 400_000.0, 500_000.0], "user": "anna"}
        item = expected.items[0]
        drops = post("/explain", **past, item=item).json()["drops"]
        assert drops == pytest.approx(recommender.explain(Request(**past), item), abs=1e-5)
        assert drops != pytest.approx(recommender.explain(Request(**past | {"times": None}), item), abs=1e-5)
        send({"event_id": "4", "user": "anna", "item": item, "kind": "hide"})
        assert ask(user="anna", k=9).json()["items"] == expected.items[1:]
        blank = ask(user="anna", history=["i1 "], allow=["i5 ", "i6"], exclude=[" i6"]).json()
        assert (blank["items"], blank["unknown"]) == (["i5"], 0)
        assert ask(user="anna", history=["i1"]).json()["items"] == recommender.recommend(["i1"], user="anna").items
        batch = [{"user": "ben"}, {"user": "anna", "k": 1}, {"history": ["i9"]}]
        answers = post("/recommend/batch", requests=batch).json()["answers"]
        assert answers[0]["items"] == recommender.recommend(["i2"]).items
        assert answers[1]["items"] == expected.items[1:2]
        assert answers[2]["items"] == recommender.recommend(["i9"]).items

        for number, user in enumerate(("kim", "kim\n", "a\nb")):
            store.add([Event(event_id=f"k{number}", user=user, item=f"i{number}", kind="view", at=now)])
        for path, item in (("kim", "i0"), ("kim%0A", "i0"), ("a%0Ab", "i2")):  # without blanks, as in a body
            assert requests.get(f"{address}/users/{path}", timeout=10).json()["items"] == [item]
        assert requests.delete(f"{address}/users/kim%0A", timeout=10).json()["events"] == 2  # also what has blanks
        assert requests.get(f"{address}/users/kim", timeout=10).json()["items"] == []

        late = Shown(recommendation_id="late", user="anna", version="7", items=["i1"], at=now)
        threading.Timer(0.3, store.show, [[late]]).start()  # by another process
        assert requests.delete(f"{address}/users/anna", timeout=10).json() == {"events": 3, "answers": 7}
        assert ask(user="anna").json()["source"] == "popularity"
        events = [
            {"item": ""},
            {"kind": "sell"},
            {"at": -1},
            {"at": 5},
            {"at": 99e9},
            {"at": now + 2 * DAY},
            {"user": "\0"},
            *({name: wrong} for name in ("user", "item") for wrong in ("u" * 257, "  ", "a\nb", "\ufffd")),
        ]
        for wrong in [*events, {"more": 1}]:
            assert send({**first, **wrong}).status_code == 422
        for wrong in ({}, {"k": 3}, {"user": "anna", "times": [1]}):
            assert ask(**wrong).status_code == 422
        assert post("/explain", **past | {"times": [1], "item": item}).status_code == 422


def test_without_a_store_a_user_alone_is_refused(recommender):
    with service(recommender) as address:
        answer = requests.post(f"{address}/recommend", json={"user": "u1"}, timeout=10)
        answers = [requests.post(f"{address}/events", json={"events": []}, timeout=10)]
        answers += [requests.get(f"{address}/{path}", timeout=10) for path in ("trending", "users/an/na", "experiment")]
        assert [answer.status_code for answer in answers] == [404] * 4
        assert all("start the service with --" in answer.json()["detail"] for answer in answers)
    assert answer.status_code == 422
    assert "--store" in answer.json()["detail"][0]["msg"]


def test_a_store_that_fails_is_a_503_and_given_histories_are_answered(recommender, store, caplog):
    with service(recommender, store=store) as address:
        module.TABLES.drop_all(store.engine)
        failed = requests.post(f"{address}/recommend", json={"user": "u1"}, timeout=10)
        given = requests.post(f"{address}/recommend", json={"user": "u1", "history": ["i1"]}, timeout=10)
        sent = {"event_id": "1", "user": "private", "item": "secret", "kind": "view"}
        refused = requests.post(f"{address}/events", json={"events": [sent]}, timeout=10)
    assert refused.status_code == 503
    assert "events.db lacks a table: start the service again" in caplog.text
    assert "could not be written" in caplog.text
    assert not {"private", "secret", "u1", "INSERT", "Traceback"} & set(re.findall(r"\w+", caplog.text))
    assert (failed.status_code, failed.headers["Retry-After"], given.status_code) == (503, "1", 200)


def test_the_command_names_what_is_wrong(tmp_path, caplog):
    assert main(["events", "dump", "--store", f"sqlite:///{tmp_path}/mistyped.db"]) == 1
    assert "mistyped.db" in caplog.text.partition("--store: there is no file")[2]
    assert not [*tmp_path.iterdir()]
    assert main(["events", "dump"]) == 1
    assert "--store or SEQREC_STORE" in caplog.text
    store = Store(f"sqlite:///{tmp_path}/events.db")
    store.add([event(1, kind="buy"), event(2)])
    assert dump(store, tmp_path / "out.csv", ["buy"]) == 1
    dumped = "user_id,item_id,timestamp\nu,i1,1\n"
    assert (tmp_path / "out.csv").read_text() == dumped
    again = ["events", "dump", "--store", f"sqlite:///{tmp_path}/events.db", "--output", str(tmp_path / "out.csv")]
    for kinds, message in (
        ("veiw", "--kinds: no kind 'veiw'; did you mean view?"),
        ("", "known are view, buy, hide"),
        ("hide", "the store has no events of the kinds hide"),
    ):
        assert main([*again, "--kinds", kinds]) == 1
        assert message in caplog.text
        caplog.clear()
    assert not (tmp_path / "out.csv.partial").exists()
    assert (tmp_path / "out.csv").read_text() == dumped


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "expected sqlite:///FILE or postgresql"),
        ("sqlite://", "names no file, so it would keep nothing; expected sqlite:///FILE or postgresql"),
        ("postgresql+pg8000://u:passw0rd@host/db", "pg8000.*expected sqlite:///FILE or postgresql"),
        ("postgresql+psycopg://u:passw0rd@127.0.0.1:port/db", "expected sqlite:///FILE or postgresql"),
        (
            "postgresql+psycopg://u:passw0rd@127.0.0.1:1/db",
            r"\*@127.0.0.1:1/db: .*check --store or SEQREC_STORE|'psycopg'",
        ),
        ("sqlite:///{0}/events.db?timeout=soon", "expected sqlite:///FILE or postgresql"),
        ("sqlite:///{0}/no/folder/events.db", "create its folder"),
        ("sqlite:///file:{0}/events.db?mode=ro&uri=true", "make the file and its folder writable"),
        ("sqlite:///{0}/locked.db", "another process has locked"),
        ("sqlite:///{0}/no-database.db", "restore it from a backup"),
    ],
)
def test_an_error_of_the_store_is_one_line_that_says_what_to_do(tmp_path, caplog, monkeypatch, url, message):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "LOCKED_MS", 0)
    for name in ("events", "locked"):
        Store(f"sqlite:///{tmp_path}/{name}.db").engine.dispose()
    (tmp_path / "no-database.db").write_text("x" * 5_000)
    with contextlib.closing(sqlite3.connect(tmp_path / "locked.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert import_into(url.format(tmp_path), tmp_path) == 1
    said = caplog.records[-1].getMessage()
    assert re.search(message, said), said
    assert len(said.splitlines()) == 1
    assert not re.search("passw0rd|private|secret|INSERT", caplog.text)


def import_into(url, folder):
    """Write a table of interactions and import it; return the exit status."""
    write_interactions(folder, [("private", "secret", 1)])
    return main(["events", "import", "--store", url, "--interactions", str(folder / "interactions.parquet")])


def test_a_database_with_a_table_of_other_software_is_refused(tmp_path, caplog):
    url = f"sqlite:///{tmp_path}/other.db"
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE answers (recommendation_id, user, at, size)")
        assert import_into(url, tmp_path) == 1
        assert f"the table answers in {url} was made by other software" in caplog.text
        assert "name another database with --store or SEQREC_STORE" in caplog.text
        assert len(other.execute("SELECT name FROM sqlite_master").fetchall()) == 1


def test_a_full_disk_is_an_error_without_what_was_sent(store):
    limit = lambda connection, _: connection.execute("PRAGMA max_page_count=20")  # noqa: E731
    sa.event.listen(store.engine, "connect", limit)
    store.engine.dispose()
    many = [event(number, user="private" * 20) for number in range(1_000)]
    with pytest.raises(StoreError, match="the disk is full") as error:
        store.add(many)
    assert "private" not in "".join(traceback.format_exception(error.value))
    assert store.histories({"nobody"})


INGESTED = {"user_id": ["u", "u"], "item_id": ["i", "j"], "timestamp": [1, 2]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item_id": ["i"], "timestamp": [1]}, "lacks one of the columns user_id"),
        (INGESTED | {"timestamp": [datetime(2001, 1, 1)] * 2}, r"column timestamp has the type timestamp\[us\]"),
        (INGESTED | {"user_id": [1, 2]}, "column user_id has the type int"),
        (INGESTED | {"item_id": ["i", None]}, "was not written by `ingest`: its column item_id has empty values"),
    ],
)
def test_a_table_that_ingest_did_not_write_is_refused(store, tmp_path, columns, message):
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=rf"--interactions: .*log.parquet .*{message}"):
        store.seed(tmp_path / "log.parquet")
