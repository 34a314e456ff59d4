"""Splits never leak, and depend on nothing but user, time and source row."""

import narwhals as nw
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqrec.config import PrepareConfig
from seqrec.data import splits


def frame(rows, names=("user", "item")):
    """(user, item, timestamp) tuples as a lazy table, numbered in order."""
    columns = {names[0]: [r[0] for r in rows], names[1]: [r[1] for r in rows], "timestamp": [r[2] for r in rows]}
    table = pl.LazyFrame(columns, schema={names[0]: pl.String, names[1]: pl.String, "timestamp": pl.Int64})
    return nw.from_native(table.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64)))


logs = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("vwxyz"), st.integers(0, 6)), max_size=60)


@pytest.mark.parametrize(
    ("rule", "rows"),
    [("none", [0, 1, 2, 3, 4]), ("exact", [0, 2, 3, 4]), ("first_pair", [2, 4])],
)
def test_deduplicate(rule, rows):
    log = frame([("a", "x", 5), ("a", "x", 5), ("a", "x", 3), ("a", "x", 9), ("a", "y", 5)])

    assert sorted(splits.deduplicate(log, rule).collect()["row"].to_list()) == rows


def numbered(rows, shuffle_seed=None):
    """Return the rows in order, users and items numbered."""
    events = frame(rows, ("user_id", "item_id"))
    if shuffle_seed is not None:
        shuffled = events.to_native().collect().sample(fraction=1, shuffle=True, seed=shuffle_seed)
        events = nw.from_native(shuffled.lazy())
    users = splits.number(events, "user_id", "user").drop("events")
    items = splits.number(events, "item_id", "item").drop("events")
    joined = events.join(users, on="user_id").join(items, on="item_id")
    table = splits.keyed(joined, 1).sort("key", "row").collect()
    time = nw.new_series("timestamp", splits.times_of(table["key"].to_numpy()), backend="polars")
    return table.with_columns((nw.col("key") // splits.TIMES + 1).alias("user"), time)


def ends_of(events, config):
    """Return what `splits.ends` does for numbered rows, and the facts."""
    return splits.ends(events.lazy(), np.bincount(events["user"].to_numpy())[1:], config)


def rows_of(ends):
    """Return the number of events, and the ends of training and validation, of each user."""
    assert (ends.valid_start == ends.train_end).all()
    return list(zip(ends.events.tolist(), ends.train_end.tolist(), ends.valid_end.tolist(), strict=True))


@settings(max_examples=40, deadline=None)
@given(logs.filter(len), st.integers(0, 1000))
def test_shuffled_rows_give_the_same_sequences(rows, seed):
    one, two = numbered(rows), numbered(rows, seed)

    for column in ("user", "item", "timestamp", "row"):
        assert one[column].to_list() == two[column].to_list()


@settings(max_examples=40, deadline=None)
@given(logs.filter(len))
def test_equal_times_keep_the_source_order(rows):
    events = numbered(rows)
    user, time, row = (events[name].to_list() for name in ("user", "timestamp", "row"))

    for i in range(1, len(user)):
        if user[i] == user[i - 1]:
            assert (time[i - 1], row[i - 1]) < (time[i], row[i])


def test_ids_are_contiguous_and_in_order_of_appearance():
    events = frame([("zoe", "q", 9), ("adam", "p", 1), ("zoe", "p", 2)])

    table = splits.number(events, "user", "number").collect()

    assert sorted(table.select("number", "user", "events").rows()) == [(1, "zoe", 2), (2, "adam", 1)]


@pytest.mark.parametrize(
    ("config", "numbers", "expected"),
    [
        ({"protocol": "LOO-full"}, [5, 2, 1], [(5, 3, 4), (2, 2, 2), (1, 1, 1)]),
        ({"protocol": "RATIO-full", "valid_share": 0.2, "test_share": 0.1}, [10, 4], [(10, 7, 9), (4, 4, 4)]),
    ],
)
def test_the_last_events_of_a_user_are_test_and_those_before_validation(config, numbers, expected):
    """Shares are rounded down: of four events, to none."""
    rows = [(f"u{user}", f"i{n}", n) for user, number in enumerate(numbers) for n in range(number)]

    table, _ = ends_of(numbered(rows), PrepareConfig(**config))

    assert rows_of(table) == expected


def test_users_who_do_not_validate_train_on_that_event():
    rows = [(f"u{u}", f"i{n}", n) for u in range(10) for n in range(4)]
    table, _ = ends_of(numbered(rows), PrepareConfig(val_users=3))
    again, _ = ends_of(numbered(rows), PrepareConfig(val_users=3))

    assert sorted(rows_of(table)) == [(4, 2, 3)] * 3 + [(4, 3, 3)] * 7
    assert rows_of(table) == rows_of(again)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 30)), min_size=20, max_size=60)
)
def test_no_training_event_is_at_or_after_a_cut(rows):
    events = numbered(rows)
    try:
        table, facts = ends_of(events, PrepareConfig(protocol="temporal", valid_share=0.2, test_share=0.2))
    except ValueError:
        return  # the times do not divide into three periods
    time, number = events["timestamp"].to_numpy(), table.events
    position = np.concatenate([np.arange(n) for n in number])
    train = position < np.repeat(table.train_end, number)
    valid = ~train & (position < np.repeat(table.valid_end, number))
    test = ~train & ~valid

    assert time[train].max() < facts["valid_cut"] <= time[~train].min()
    assert time[~test].max() < facts["test_cut"] <= time[test].min()


def test_equal_times_cannot_be_cut():
    with pytest.raises(ValueError, match=r"prepare\.protocol temporal"):
        ends_of(numbered([("a", f"i{n}", 7) for n in range(10)]), PrepareConfig(protocol="temporal"))


def test_cuts_are_order_statistics_of_all_times():
    """Several events a day, and days without any."""
    times = np.random.default_rng(0).integers(0, 40 * splits.DAY, size=500)
    times[:100] = 7 * splits.DAY + 5
    events = numbered([(f"u{n % 7}", f"i{n % 11}", int(t)) for n, t in enumerate(times)])

    _, facts = ends_of(events, PrepareConfig(protocol="temporal", valid_share=0.3, test_share=0.2))

    assert (facts["valid_cut"], facts["test_cut"]) == (np.sort(times)[250], np.sort(times)[400])


def test_a_sample_of_users_depends_on_the_set_of_ids():
    ids = np.array([f"u{n}" for n in range(10)], dtype=object)

    drawn = ids[splits.sample_users(ids, 3, seed=1)]

    assert len(set(drawn)) == 3
    assert drawn.tolist() == ids[::-1][splits.sample_users(ids[::-1], 3, seed=1)].tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 12), max_size=20), min_size=1, max_size=6), st.integers(1, 8), st.integers(0, 9)
)
def test_negatives_are_distinct_and_unseen(histories, number, seed):
    item = np.array([item for row in histories for item in row], dtype=np.int64)
    events = np.array([len(row) for row in histories])
    unseen = [set(range(1, 13)) - set(row) for row in histories]

    if min(map(len, unseen)) < number:
        with pytest.raises(ValueError, match=r"prepare\.protocol LOO-101"):
            splits.draw_negatives(item, events, 12, number, seed)
        return
    drawn = splits.draw_negatives(item, events, 12, number, seed)

    assert all(len(set(row)) == number and set(row) <= free for row, free in zip(drawn.tolist(), unseen, strict=True))
    assert np.array_equal(drawn, splits.draw_negatives(item, events, 12, number, seed))


def test_negatives_are_uniform_over_the_unseen_items():
    events = np.full(20_000, 2)
    drawn = splits.draw_negatives(np.tile([2, 5], 20_000), events, 6, 2, seed=0)

    share = np.bincount(drawn.ravel(), minlength=7)[1:] / 20_000
    assert share == pytest.approx([0.5, 0, 0.5, 0.5, 0, 0.5], abs=0.015)


def test_noise_changes_the_share_of_train_and_nothing_else():
    share = 0.25
    rows = [(f"u{user}", f"i{(user * 7 + event) % 40}", event) for user in range(30) for event in range(5 + user)]
    events = numbered(rows)
    table, _ = ends_of(events, PrepareConfig())

    before = events["item"].to_numpy()
    after = splits.with_noise(before, table, 40, share, seed=1)

    number, train_end = table.events, table.train_end
    user = np.repeat(np.arange(len(number)), number)
    position = np.arange(len(user)) - np.repeat(np.cumsum(number) - number, number)
    in_train = position < train_end[user]
    changed = before != after
    assert not changed[~in_train].any()
    assert round(share * in_train.sum()) * 0.9 <= changed.sum() <= round(share * in_train.sum())  # some draws hit
    assert after.min() >= 1
    assert after.max() <= 40
    for place in np.flatnonzero(changed):
        assert after[place] not in before[(user == user[place]) & ~in_train]
    assert splits.with_noise(before, table, 40, share, seed=1).tolist() == after.tolist()
    assert splits.with_noise(before, table, 40, share, seed=2).tolist() != after.tolist()
    assert splits.with_noise(before, table, 40, 0.0, seed=1) is before


def test_noise_never_draws_what_the_user_does_later():
    events = numbered([("a", item, time) for time, item in enumerate("xxxxxxxxyz")])
    table, _ = ends_of(events, PrepareConfig())

    items = events["item"].to_numpy()

    assert splits.with_noise(items, table, 3, 0.99, seed=0).tolist() == items.tolist()  # of three items, two come later


def test_noise_without_an_item_to_draw_is_refused():
    events = numbered([("a", item, time) for time, item in enumerate("xxyxy")])
    table, _ = ends_of(events, PrepareConfig())

    with pytest.raises(ValueError, match="noise_share"):
        splits.with_noise(events["item"].to_numpy(), table, 2, 0.5, seed=0)
