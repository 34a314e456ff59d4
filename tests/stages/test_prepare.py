import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc
from support import contents, prepare_rows, synthetic_rows, write_interactions

from seqrec.artifacts import read_json, write_json
from seqrec.config import ConfigError, PrepareConfig
from seqrec.data import sequences
from seqrec.stages.prepare import prepare


def events_of(folder):
    return ipc.open_file(folder / "sequences.arrow").read_all()


def names(folder, file, column):
    return pq.read_table(folder / file)[column].to_pylist()


def test_the_vocabulary_counts_train_alone(tmp_path):
    rows = [("a", item, time) for time, item in enumerate("xyxzw")]
    folder = prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1)

    vocabulary = pq.read_table(folder / "vocabulary.parquet").to_pylist()

    assert [(row["item"], row["item_id"], row["count"]) for row in vocabulary] == [
        (1, "x", 2),
        (2, "y", 1),
        (3, "z", 0),
        (4, "w", 0),
    ]
    counts = read_json(folder / "split.json")["counts"]
    assert counts.items() >= {"users": 1, "events": 5, "train": 3, "valid": 1, "test": 1, "cold_items": 2}.items()


def test_all_equal_times_keep_the_source_order(tmp_path):
    rows = [("a", item, 7) for item in "qwert"] + [("b", item, 7) for item in "trewq"]
    folder = prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1)

    assert read_json(folder / "split.json")["counts"]["tied_events"] == 8
    assert sequences.load(folder).items.tolist() == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("protocol", ["LOO-101", "RATIO-full", "temporal"])
def test_shards_hold_the_same_events(tmp_path, protocol):
    rows = synthetic_rows(items=150, users=90)
    rows += rows[::9]  # repeated events, far from the first ones
    whole = prepare_rows(tmp_path / "whole", rows, protocol=protocol)
    parts = prepare_rows(tmp_path / "parts", rows, protocol=protocol, shard_events=200)

    one, two = events_of(whole), events_of(parts)
    assert len(one["items"].chunks) == 1
    assert len(two["items"].chunks) > 3
    assert two.combine_chunks().equals(one.combine_chunks())
    one, two = contents(whole), contents(parts)
    cards = json.loads(one.pop("split.json")), json.loads(two.pop("split.json"))
    assert cards[0].pop("split_sha256") != cards[1].pop("split_sha256")
    assert cards[0] == cards[1]
    assert one.pop("sequences.arrow") != two.pop("sequences.arrow")
    assert one == two  # nothing of the scratch files is left


@pytest.mark.parametrize(("least", "kept"), [(0.0, 36), (-5.0, 30), (2.0, 16)])
def test_events_under_the_minimum_rating_are_left_out(tmp_path, least, kept):
    rows, ratings = [(f"u{n % 3}", f"i{n // 3}", n) for n in range(36)], [float(n % 18 - 8) for n in range(36)]

    folder = prepare_rows(tmp_path, rows, ratings=ratings, min_rating=least, min_user_events=1, min_item_events=1)

    assert read_json(folder / "split.json")["counts"]["events"] == kept


def test_noise_is_drawn_over_all_events_at_once(tmp_path):
    rows = synthetic_rows()
    one = prepare_rows(tmp_path / "one", rows, noise_share=0.2)
    two = prepare_rows(tmp_path / "two", rows, noise_share=0.2, shard_events=100)

    assert contents(one) == contents(two)


def test_a_dump_that_extends_another_keeps_its_numbers(tmp_path):
    old = synthetic_rows(users=30, items=30)
    new = synthetic_rows(users=45, items=50, seed=1)
    # the new dump is in another order, and an item and a user of the old one are in it no more
    gone = [row for row in new + old if row[0] != "u3" and row[1] != "i7"]
    first = prepare_rows(tmp_path / "first", old, min_user_events=2, min_item_events=2)
    second = prepare_rows(tmp_path / "second", gone, min_user_events=2, min_item_events=2, extend=str(first))

    for file, column in (("users.parquet", "user_id"), ("vocabulary.parquet", "item_id")):
        before, now = names(first, file, column), names(second, file, column)
        assert now[: len(before)] == before
        assert len(now) == len(set(now)) > len(before)
    growth = read_json(second / "split.json")["extends"]
    assert growth["split_sha256"] == read_json(first / "split.json")["split_sha256"]
    assert (growth["users"]["known"], growth["users"]["new"], growth["users"]["gone"]) == (30, 15, 1)
    assert (growth["items"]["known"], growth["items"]["new"], growth["items"]["gone"]) == (30, 20, 1)
    assert growth["items"]["drift"] > 0.25
    assert read_json(second / "split.json")["absent"] == [1 + names(first, "vocabulary.parquet", "item_id").index("i7")]

    data = sequences.load(second)
    place = names(second, "users.parquet", "user_id").index("u3")
    assert data.start[place] == data.stop[place]
    assert len(sequences.cases(data, "test")) == data.num_users - 1


def test_shards_of_a_dump_whose_last_users_have_left_hold_all_events(tmp_path):
    first = prepare_rows(tmp_path / "first", synthetic_rows(users=20))
    rows = [row for row in synthetic_rows(users=20) if row[0] not in ("u17", "u18", "u19")]
    whole = events_of(prepare_rows(tmp_path / "whole", rows, extend=str(first)))
    assert whole.num_rows == 20
    for size in (20, 35, 56, 59):  # in the first three, a shard would begin with a user who has left
        parts = events_of(prepare_rows(tmp_path / f"of {size}", rows, extend=str(first), shard_events=size))
        assert parts.combine_chunks().equals(whole.combine_chunks())


def test_other_cases_are_another_split(tmp_path):
    settings = ({}, {"cases": "first"}, {"max_cases": 5}, {"max_cases": 5, "seed": 1}, {"max_cases": 6})
    folders = [
        prepare_rows(tmp_path / str(number), synthetic_rows(), protocol="temporal", **some)
        for number, some in enumerate(settings)
    ]
    assert len({read_json(folder / "split.json")["split_sha256"] for folder in folders}) == len(settings)


@pytest.mark.parametrize(("place", "message"), [("nowhere", "users.parquet not found"), ("sequences", "this stage")])
def test_a_folder_that_cannot_be_extended_is_refused(tmp_path, place, message):
    prepare_rows(tmp_path, synthetic_rows())
    with pytest.raises(ConfigError, match=message):
        prepare_rows(tmp_path, synthetic_rows(), extend=str(tmp_path / place))


def test_filters_that_leave_nothing_name_the_settings(tmp_path):
    with pytest.raises(ValueError, match=r"prepare\.min_user_events \(99\)"):
        prepare_rows(tmp_path, synthetic_rows(), min_user_events=99)


@pytest.mark.parametrize("verdict", [{"success": False}, {"success": True, "input_sha256": "another"}])
def test_data_that_was_not_validated_is_refused(tmp_path, verdict):
    write_interactions(tmp_path, synthetic_rows())
    write_json(tmp_path / "validation.json", {"input_sha256": "", **verdict})

    paths = {"data": tmp_path, "validation": tmp_path / "validation.json", "sequences": tmp_path / "s"}

    with pytest.raises(ValueError, match="not a successful validation"):
        prepare(dataset="x", config=PrepareConfig(), **paths)


def test_items_without_a_title_can_be_dropped(tmp_path):
    write_interactions(tmp_path, [(u, i, t) for u in "ab" for t, i in enumerate("xyz")])
    pq.write_table(pa.table({"item_id": ["x", "y", "z"], "title": ["X", "", None]}), tmp_path / "items.parquet")
    config = PrepareConfig(require_title=True, min_user_events=1, min_item_events=1)
    paths = {"data": tmp_path, "validation": tmp_path / "validation.json", "sequences": tmp_path / "s"}

    assert prepare(dataset="x", config=config, **paths)["items"] == 1
    assert read_json(tmp_path / "s" / "split.json")["dropped"]["events of items without title"] == 4


TEMPORAL = {"protocol": "temporal", "deduplicate": "none", "min_user_events": 3, "min_item_events": 3}


def trained_on(folder):
    """Return the ids of the vocabulary with their counts, and the training items of each user who has any."""
    vocabulary = pq.read_table(folder / "vocabulary.parquet").select(["item_id", "count"]).to_pylist()
    table, users = events_of(folder), names(folder, "users.parquet", "user_id")
    rows = zip(users, table["items"].to_pylist(), table["train_end"].to_pylist(), strict=True)
    return vocabulary, [(user, items[:end]) for user, items, end in rows if end]


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_events_after_the_cut_do_not_decide_what_is_trained_on(tmp_path_factory, seed):
    """Others take their place, fewer or more, of other users, items and times; the cut stays where it is."""
    generator = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("temporal")
    rows = [(f"u{u}", f"i{i}", int(t)) for u, i, t in generator.integers(0, [12, 12, 400], size=(150, 3))]
    before = prepare_rows(folder / "before", rows, **TEMPORAL)
    cut = read_json(before / "split.json")["valid_cut"]

    early = [row for row in rows if row[2] < cut]
    number = int(generator.integers(3, 60))
    times = np.append([cut, 450], generator.integers(cut, 450, size=number))
    drawn = generator.integers(0, 20, size=(2, len(times)))
    late = [(f"u{u}", f"i{i}", int(t)) for u, i, t in zip(*drawn, times, strict=True)]
    changed = late + early  # their rows come first in the source
    shares = {"test_share": 0.5 / len(changed), "valid_share": 1 - (len(early) + 1) / len(changed)}
    after = prepare_rows(folder / "after", changed, **TEMPORAL, **shares)

    assert read_json(after / "split.json")["valid_cut"] == cut
    assert trained_on(before) == trained_on(after)


def test_a_k_core_over_all_events_is_one_setting_away(tmp_path):
    """Item `late` and user `new` have no event before the cut at 80."""
    rows = [(f"u{n % 4}", f"i{n % 3}", n) for n in range(80)]
    rows += [("new" if n % 2 else "u1", "late" if n % 3 else "i1", n) for n in range(80, 100)]
    folders = {on: prepare_rows(tmp_path / on, rows, protocol="temporal", filter_on=on) for on in ("train", "all")}
    cards = {on: read_json(folder / "split.json") for on, folder in folders.items()}

    assert [cards[on]["filter_on"] for on in cards] == ["train", "all"]
    assert names(folders["train"], "vocabulary.parquet", "item_id") == ["i0", "i1", "i2"]
    assert names(folders["all"], "vocabulary.parquet", "item_id") == ["i0", "i1", "i2", "late"]
    assert names(folders["train"], "users.parquet", "user_id") == ["u0", "u1", "u2", "u3", "new"]
    assert cards["train"]["users_without_training"] == 1
    assert cards["train"]["dropped"]["items outside the k-core"] == 1


def test_events_of_users_outside_the_core_are_read_but_not_learnt(tmp_path):
    """Before the cut at 80, `few` has one event of an item in the core and one of another; `left` never returns."""
    rows = [(f"u{n % 4}", f"i{n % 3}", n) for n in range(80)] + [("few", "i1", 5), ("few", "odd", 6), ("left", "i1", 7)]
    rows += [("few" if n % 2 else "u1", f"i{n % 3}", n) for n in range(80, 100)]
    folder = prepare_rows(tmp_path, rows, protocol="temporal", test_share=0.09)
    data, card = sequences.load(folder), read_json(folder / "split.json")
    users, items = names(folder, "users.parquet", "user_id"), names(folder, "vocabulary.parquet", "item_id")
    few = users.index("few")
    valid, test = (sequences.cases(data, split) for split in ("valid", "test"))

    assert (items, users) == (["i0", "i1", "i2"], ["u0", "u1", "u2", "u3", "few"])
    assert data.start[few] == data.train_stop[few] == data.valid_start[few] - 1
    assert data.items[int(data.start[few])] == items.index("i1") + 1
    assert valid.position[valid.user == few][0] == data.valid_start[few]
    assert len(valid) + len(test) == 20 == card["counts"]["valid"] + card["counts"]["test"]
    assert int(data.count.sum()) == 80 == card["counts"]["train"]
    assert (card["users_without_training"], card["events_only_read"]) == (1, 1)
    refitted = sequences.trained_until(data, data.valid_stop)
    assert (refitted.valid_start == data.valid_stop).all()


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, two = (prepare_rows(tmp_path / name, synthetic_rows()) for name in ("one", "two"))

    assert contents(one) == contents(two)
