import shutil

import pyarrow.parquet as pq
import pytest
from support import imported, prepare_rows, save, synthetic_rows

from seqrec.__main__ import main
from seqrec.artifacts import ITEMS
from seqrec.commands import recommend
from seqrec.config import ConfigError
from seqrec.data import sequences
from seqrec.serving.recommender import Recommender, Request


@pytest.fixture(scope="module")
def saved(prepared, tmp_path_factory):
    return save("sasrec", prepared, tmp_path_factory.mktemp("saved"), model="sasrec")


def test_scores_of_every_user_are_the_recommenders(prepared, tmp_path, monkeypatch):
    k = 27  # not every user has so many items left
    monkeypatch.setattr(recommend, "USERS_AT_ONCE", 7)
    saved = save("gru4rec", prepared, tmp_path / "model")

    values = recommend.score(sequences=prepared, saved=saved, output=tmp_path / "out" / "best.parquet", k=k)

    table = pq.read_table(tmp_path / "out" / "best.parquet")
    data, item_ids = sequences.load(prepared), sequences.read_items(prepared)
    assert values == {"users": data.num_users}
    assert table["user_id"].to_pylist() == sequences.read_users(prepared)
    histories = [
        [item_ids[item - 1] for item in data.items[start:stop].tolist()]
        for start, stop in zip(data.start.tolist(), data.stop.tolist(), strict=True)
    ]
    answers = Recommender.load(saved).answer([Request(history=history, k=k) for history in histories])
    assert table["items"].to_pylist() == [answer.items for answer in answers]
    for scores, answer in zip(table["scores"].to_pylist(), answers, strict=True):
        assert scores == pytest.approx(answer.scores, abs=1e-5)


def test_an_output_that_is_no_parquet_file_is_refused(prepared, saved, tmp_path):
    with pytest.raises(ConfigError, match=r"--output: .*best\.csv must end in \.parquet"):
        recommend.score(sequences=prepared, saved=saved, output=tmp_path / "best.csv")
    assert not (tmp_path / "best.csv").exists()


def test_a_model_of_another_catalogue_is_refused(prepared, saved, tmp_path):
    mirrored = [(user, f"i{39 - int(item[1:])}", time) for user, item, time in synthetic_rows()]
    other = prepare_rows(tmp_path / "other", mirrored)  # of the same size, the ids in another order

    with pytest.raises(ValueError, match="the item_ids differ, or their order does"):
        recommend.score(sequences=other, saved=saved, output=tmp_path / "best.parquet")
    assert not (tmp_path / "best.parquet").exists()


def test_recommendations_are_printed_with_titles(saved, capsys):
    status = main(["recommend", "--history", "i1, no such", "--k", "3", "--saved", str(saved)])

    printed = capsys.readouterr().out
    assert status == 0
    best = Recommender.load(saved).recommend(["i1", "no such"], 3)
    for item_id in best.items:
        assert f"Title of {item_id}" in printed
    assert "no such   (unknown, skipped)" in printed
    assert "Title of i1" in printed
    assert "sasrec recommends" in printed


def test_items_without_titles_have_no_column_of_titles(saved, tmp_path, capsys):
    sequences = prepare_rows(tmp_path / "data", synthetic_rows())
    (tmp_path / "data" / ITEMS).unlink()
    untitled = save("sasrec", sequences, tmp_path / "untitled", model="sasrec")

    for folder, titled in ((saved, True), (untitled, False)):
        assert main(["recommend", "--history", "i1", "--saved", str(folder)]) == 0
        assert ("title" in capsys.readouterr().out) is titled


def test_a_model_in_a_folder_needs_no_params_yaml(saved, tmp_path, capsys, caplog, monkeypatch):
    saved = saved.resolve()
    monkeypatch.chdir(tmp_path)

    assert main(["recommend", "--history", "i1", "--saved", str(saved)]) == 0
    assert "sasrec recommends" in capsys.readouterr().out
    assert main(["recommend", "--history", "i1", "--saved", "models:/seqrec/1"]) == 1  # the settings name the registry
    assert main(["recommend", "--history", "i1", "--saved", str(saved), "--params", "my.yaml"]) == 1
    assert "my.yaml not found" in caplog.text
    assert main(["recommend", "--history", "i1", "--saved", "mistyped"]) == 1
    assert "mistyped" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('"Salt, fine", i1,,i2 ', ["Salt, fine", "i1", "i2"]),
        ('12" vinyl,"""A"" side"', ['12" vinyl', '"A" side']),
        (" ", []),
    ],
)
def test_an_item_id_with_a_comma_is_quoted(text, ids):
    assert recommend._ids("history", text) == ids


def test_an_open_quotation_mark_is_refused(caplog):
    assert main(["recommend", "--history", "i1", "--exclude", 'i2,"i3', "--saved", "none"]) == 1
    assert """--exclude: 'i2,"i3' is not a line of CSV""" in caplog.text


def test_recommendations_import_nothing_that_takes_time_but_torch(saved):
    packages = imported("recommend", "--history", "i1", "--saved", str(saved))

    assert "torch" in packages
    assert packages.isdisjoint({"pandas", "mlflow", "transformers", "polars", "great_expectations"})


def test_the_output_of_a_run_is_no_model_and_the_message_names_those_in_it(saved, tmp_path, caplog):
    shutil.copytree(saved, tmp_path / "artifacts/sasrec/finetuned")

    assert main(["recommend", "--history", "i1", "--saved", str(tmp_path)]) == 1
    assert f"name one of {tmp_path}/artifacts/sasrec/finetuned" in caplog.text


def test_an_explanation_stands_beside_the_events(saved, capsys):
    history = ["i1", "no such", "i4"]

    main(["recommend", "--history", ", ".join(history), "--saved", str(saved), "--explain"])

    recommender = Recommender.load(saved)
    drops = recommender.explain(Request(history=history), recommender.recommend(history, 1).items[0])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("after")]
    assert [line[-1] for line in lines] == [f"{drops[0]:+.3f}", "skipped)", f"{drops[2]:+.3f}"]
    assert lines[0][-1] != lines[2][-1]


def test_popular_items_have_no_explanation_but_a_hint_if_the_separator_may_be_another(saved, capsys):
    assert main(["recommend", "--history", "i1;i2", "--saved", str(saved), "--explain"]) == 0

    printed = capsys.readouterr().out
    assert "how much the score" not in printed
    assert "Separate the item ids of --history by commas." in printed
