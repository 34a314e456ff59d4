from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from support import prepare_rows

from seqrec.artifacts import SPLIT_CARD, write_json
from seqrec.data import sequences

ROWS = [(u, i, t) for u, row in {"u": "abcd", "v": "bad"}.items() for t, i in enumerate(row, start=100)]


def small(folder, **config):
    return prepare_rows(folder, ROWS, min_user_events=1, min_item_events=1, **config)


@pytest.fixture
def data(tmp_path):
    """Items a b c d = 1 2 3 4; user 1: 1 2 3 4, user 2: 2 1 4."""
    return sequences.load(small(tmp_path))


def test_a_dataset_is_read_back(data):
    assert data.items.tolist() == [1, 2, 3, 4, 2, 1, 4]
    assert data.times.tolist() == [100, 101, 102, 103, 100, 101, 102]
    assert data.start.tolist() == [0, 4]
    assert data.train_stop.tolist() == [2, 5]
    assert data.valid_stop.tolist() == [3, 6]
    assert data.stop.tolist() == [4, 7]
    assert data.count.tolist() == [0, 1, 2, 0, 0]  # train events alone: 1 2 | 2


def test_windows_are_left_padded_and_end_before_the_stop(data):
    batch = sequences.window(data, torch.tensor([0, 1]), torch.tensor([3, 6]), 4)

    assert batch.items.tolist() == [[0, 1, 2, 3], [0, 0, 2, 1]]
    assert batch.times.tolist() == [[0, -2, -1, 0], [0, 0, -1, 0]]
    assert batch.user.tolist() == [1, 2]  # also of the second user, of whom training has one event and no target
    empty = sequences.window(data, torch.tensor([1]), torch.tensor([4]), 4)
    assert empty.items.tolist() == [[0, 0, 0, 0]]  # never what is before it, the events of the first user


def test_times_count_from_the_request_which_comes_at_the_time_of_the_next_event(data):
    batch = sequences.window(data, torch.tensor([0, 1, 0]), torch.tensor([2, 6, 4]), 3, from_request=True)

    assert batch.items.tolist() == [[0, 1, 2], [0, 2, 1], [2, 3, 4]]
    assert batch.times.tolist() == [[0, -2, -1], [0, -2, -1], [-2, -1, 0]]  # the third user's history is complete


def test_cases(data):
    valid, test = (sequences.cases(data, split) for split in ("valid", "test"))

    assert valid.user.tolist() == test.user.tolist() == [0, 1]
    assert (valid.position.tolist(), test.position.tolist()) == ([2, 5], [3, 6])


def test_max_cases_draws_the_same_cases_every_time(prepared):
    data = sequences.load(prepared)
    every = sequences.cases(data, "test")
    limited = replace(data, card=data.card | {"max_cases": 7})

    drawn, again = sequences.cases(limited, "test"), sequences.cases(limited, "test")

    assert len(drawn) == 7 < len(every)
    assert drawn.position.tolist() == sorted(again.position.tolist())
    assert set(zip(drawn.user.tolist(), drawn.position.tolist(), strict=True)) < set(
        zip(every.user.tolist(), every.position.tolist(), strict=True)
    )
    other = replace(limited, card=limited.card | {"seed": 1})
    assert sequences.cases(other, "test").position.tolist() != drawn.position.tolist()


def test_seen_items_are_the_events_before(data):
    row, item = sequences.seen(data, torch.tensor([0, 1]), torch.tensor([2, 6]))

    assert row.tolist() == [0, 0, 1, 1]
    assert item.tolist() == [1, 2, 2, 1]


def test_every_event_after_a_temporal_cut_is_a_case(tmp_path):
    rows = [(u, f"i{n % 7}", 10 * n + k) for k, u in enumerate("abc") for n in range(20)]
    shares = {"protocol": "temporal", "valid_share": 0.2, "test_share": 0.2}
    every = sequences.load(prepare_rows(tmp_path / "all", rows, **shares))
    first = sequences.load(prepare_rows(tmp_path / "first", rows, **shares, cases="first"))

    assert len(sequences.cases(every, "test")) == int((every.stop - every.valid_stop).sum()) > 3
    assert sequences.cases(first, "test").position.tolist() == first.valid_stop.tolist()


@pytest.fixture
def sharded(tmp_path, data):
    """The dataset of `data` in two shards, a user each."""
    loaded = sequences.load(small(tmp_path / "sharded", shard_events=4))
    assert [len(part) for part in loaded.items.parts] == [4, 3]
    return loaded


def test_shards_are_one_array(data, sharded):
    for name in ("start", "train_stop", "valid_stop", "stop", "count"):
        assert getattr(sharded, name).tolist() == getattr(data, name).tolist()
    index = torch.tensor([[6, 0, 3], [4, 4, 2]])
    for whole, shards in ((data.items, sharded.items), (data.times, sharded.times)):
        assert len(shards) == len(whole)
        assert shards[index].tolist() == whole[index].tolist()
        assert shards[index].dtype == whole.dtype
        assert shards[torch.arange(7) % 2 == 0].tolist() == whole[::2].tolist()


@pytest.mark.parametrize("resident", [True, False])
def test_windows_and_seen_items_are_the_same_from_shards(data, sharded, resident):
    moved = sharded.to(torch.device("cpu"), resident=resident)
    user, stop = torch.tensor([0, 1, 1]), torch.tensor([3, 6, 4])
    assert moved.items is sharded.items  # nothing was copied

    for one, other in zip(sequences.window(data, user, stop, 4), sequences.window(moved, user, stop, 4), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(sequences.seen(data, user, stop), sequences.seen(moved, user, stop), strict=True):
        assert torch.equal(one, other)


def test_the_file_is_mapped_not_read(tmp_path):
    """What a loaded dataset holds lies in the file: a write through another map shows."""
    folder = small(tmp_path)
    loaded = sequences.load(folder)
    content = (folder / "sequences.arrow").read_bytes()
    place = content.index(torch.tensor([1, 2, 3, 4, 2, 1, 4], dtype=torch.int32).numpy().tobytes())
    with (folder / "sequences.arrow").open("r+b") as file:
        file.seek(place)
        file.write(b"\x04")

    assert loaded.items.tolist() == [4, 2, 3, 4, 2, 1, 4]


def test_a_dataset_is_loaded_anew_once_its_files_or_the_folder_change(tmp_path):
    folder, other = small(tmp_path), small(tmp_path / "other")
    first = sequences.load(folder)
    assert sequences.load(folder) is first

    assert sequences.load(other) is not first
    before = sequences.load(folder)
    write_json(folder / SPLIT_CARD, before.card | {"dataset": "renamed"})
    assert sequences.load(folder).card["dataset"] == "renamed"


def test_another_schema_is_refused(tmp_path):
    folder = small(tmp_path)
    with pa.OSFile(str(folder / "sequences.arrow"), "wb") as file:
        table = pa.table({"user": [1]})
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    with pytest.raises(ValueError, match="prepare stage"):
        sequences.load(folder)
