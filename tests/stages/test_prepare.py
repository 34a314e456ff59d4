import pyarrow.parquet as pq
import pytest
from conftest import prepare_rows, synthetic_rows, write_interactions

from seqrec.artifacts import read_json, write_json
from seqrec.config import PrepareConfig
from seqrec.stages.prepare import prepare


def test_the_split_card_says_what_was_done(prepared):
    card = read_json(prepared / "split.json")

    assert card["protocol"] == "LOO-full"
    assert card["counts"]["users"] == card["counts"]["valid"] == card["counts"]["test"] == 60
    assert card["counts"]["events"] == card["counts"]["train"] + 120
    assert len(card["input_sha256"]) == len(card["split_sha256"]) == 64


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
    assert read_json(folder / "split.json")["counts"]["cold_items"] == 2


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, two = (prepare_rows(tmp_path / name, synthetic_rows()) for name in ("one", "two"))

    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_all_equal_times_keep_the_source_order(tmp_path):
    rows = [("a", item, 7) for item in "qwert"] + [("b", item, 7) for item in "trewq"]
    folder = prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1)

    assert read_json(folder / "split.json")["counts"]["tied_events"] == 8
    from seqrec.data import sequences

    assert sequences.load(folder).items.tolist() == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]


def test_filters_that_leave_nothing_name_the_settings(tmp_path):
    with pytest.raises(ValueError, match=r"prepare\.min_user_events \(99\)"):
        prepare_rows(tmp_path, synthetic_rows(), min_user_events=99)


@pytest.mark.parametrize("verdict", [{"success": False}, {"success": True, "input_sha256": "another"}])
def test_data_that_was_not_validated_is_refused(tmp_path, verdict):
    write_interactions(tmp_path, synthetic_rows())
    write_json(tmp_path / "validation.json", {"input_sha256": "", **verdict})

    with pytest.raises(ValueError, match="no successful validation"):
        prepare(
            dataset="x",
            data=tmp_path,
            validation=tmp_path / "validation.json",
            sequences=tmp_path / "s",
            config=PrepareConfig(),
        )


def test_items_without_a_title_can_be_dropped(tmp_path):
    import pyarrow as pa

    rows = [(u, i, t) for u in "ab" for t, i in enumerate("xyz")]
    write_interactions(tmp_path, rows)
    titles = pa.table({"item_id": ["x", "y", "z"], "title": ["X", "", None]})
    pq.write_table(titles, tmp_path / "items.parquet")
    config = PrepareConfig(require_title=True, min_user_events=1, min_item_events=1)

    values = prepare(
        dataset="x",
        data=tmp_path,
        validation=tmp_path / "validation.json",
        sequences=tmp_path / "s",
        config=config,
    )

    assert values["items"] == 1
    assert read_json(tmp_path / "s" / "split.json")["dropped"]["events of items without title"] == 4
