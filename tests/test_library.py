"""The library: figures equal to the pipeline's, frames of any kind, own models, and the page that shows it."""

from __future__ import annotations

import ast
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import yaml
from support import ROOT, figures, synthetic_rows

import seqrec
from seqrec import config
from seqrec.__main__ import main
from seqrec.models import REGISTRY
from seqrec.models.gru4rec import GRU4Rec
from seqrec.serving.rules import Attribute, Attributes
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.progress import ProgressBar

NAMES = ["Customer ID", "SKU", "bought_at", "product_name"]
OPTIONS = {"d_model": 16, "heads": 2}
FINETUNE = {"epochs": 2, "batch_size": 32}
QUICK = {"epochs": 1, "counts": "none"}  # the search for counts takes longer than an epoch
CELL = type("Cell", (GRU4Rec,), {"__module__": "no_such_module"})  # as in a cell of a notebook


def frame(users=60):
    rows = [(user, item, 1_500_000_000 + time, f"Thing {item}") for user, item, time in synthetic_rows(users=users)]
    return pl.DataFrame(rows, schema=NAMES, orient="row")


@pytest.fixture(scope="module")
def data():
    return seqrec.Dataset.from_frame(frame())


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    return seqrec.fit(data, "sasrec", options=OPTIONS, finetune=FINETUNE, seed=7, folder=folder)


def test_figures_are_those_of_the_pipeline(data, model, tmp_path):
    settings = model.folder.parents[2] / "params.yaml"

    assert main(["run", "--config-file", str(settings), "--out", str(tmp_path / "run")]) == 0
    described = seqrec.Dataset.from_params(settings, folder=tmp_path / "again")
    with pytest.raises(ValueError, match="minutes: the dataset's settings, which have sasrec under `models`"):
        seqrec.fit(described, "sasrec", minutes=1)
    same = seqrec.fit(described, "sasrec")

    ran = figures(json.loads((tmp_path / "run" / "reports" / "sasrec" / "metrics.json").read_text()))
    content = yaml.safe_load(settings.read_text())
    assert content["seed"] == 7
    assert content["models"]["sasrec"]["finetune"] | FINETUNE == content["models"]["sasrec"]["finetune"]
    assert figures(model.evaluate().metrics) == ran
    assert figures(same.evaluate().metrics) == ran
    assert figures(model.evaluate(data).metrics) == ran


def test_a_model_that_the_settings_search_is_trained_by_itself(data, tmp_path):
    spaces = {name: {"options.dropout": {"low": 0.1, "high": 0.3}} for name in ("sasrec", "gru4rec")}
    settings = data.params.as_dict() | {"models": {"sasrec": {}, "gru4rec": {}}, "tune": {"spaces": spaces}}
    searched = seqrec.Dataset(data.folder, config.from_dict(settings))

    assert seqrec.fit(searched, "sasrec", options=OPTIONS, finetune=QUICK, folder=tmp_path).name == "sasrec"
    assert seqrec.fit(searched, "fpmc", finetune=QUICK).name == "fpmc"


def test_a_history_without_counts_gets_the_popular_items_and_the_note_says_so(caplog):
    """Of these users, "end" is the last event in training, so that nothing was counted after it."""
    around = [[f"i{(user + step) % 9}" for step in range(6)] for user in range(30)]
    histories = [["fork", "a" if user % 2 else "b", *own, "end", "i1", "i2"] for user, own in enumerate(around)]
    events = pl.DataFrame(
        [(user, item, 1_600_000_000 + 100 * n) for user, own in enumerate(histories) for n, item in enumerate(own)],
        schema=["user", "item", "time"],
        orient="row",
    )
    model = seqrec.fit(seqrec.Dataset.from_frame(events), "markov")

    best = model.recommend(["end"], k=4, diversity=0.5)

    assert "markov has counted nothing after this history: these are the most popular items" in caplog.text
    assert "diversity has no effect: markov has no vectors of items" in caplog.text
    popular = [item for item in model.recommender.popular(5).items if item != "end"]
    assert best["item"].to_list() == popular[:4]
    assert model.recommend(["i3"], k=1)["item"].to_list() == ["i4"]
    assert set(model.recommend(["fork"], k=2)["item"]) == {"a", "b"}  # which have one score


def test_a_sample_of_the_cases_can_be_ranked(data):
    some = seqrec.Dataset.from_frame(frame().lazy(), max_cases=np.int64(20))

    assert some.card["counts"]["events"] == data.card["counts"]["events"]
    values = [seqrec.fit(one, "popularity").evaluate().metrics["test/cases"] for one in (data, some)]

    assert values[1] == 20 < values[0]


def test_a_baseline_is_fitted_like_a_model(data, tmp_path):
    model = seqrec.fit(data, "pctm")

    assert model.evaluate().metrics["test/ndcg@10"] == model.evaluate(data).metrics["test/ndcg@10"] > 0
    model.save(tmp_path / "saved")
    ours, theirs = (
        m.recommend(history=["i3", "i4"], k=5, explain=True) for m in (model, seqrec.load(tmp_path / "saved"))
    )
    assert ours.equals(theirs)
    assert [event["event"] for event in ours["because"][0]] == ["i3", "i4"]
    assert any(event["drop"] for event in ours["because"][0])
    with pytest.raises(ValueError, match="minutes: pctm is a baseline"):
        seqrec.fit(data, "pctm", minutes=1)
    assert seqrec.fit(data, "repeats").evaluate().metrics["test/ndcg@10"] > 0  # more than a tenth of the log
    new = seqrec.Dataset.from_frame(frame().unique(NAMES[:2], keep="first", maintain_order=True))
    with pytest.raises(ValueError, match="repeats is left out: filter_seen removes"):
        seqrec.fit(new, "repeats")


def test_the_table_has_values_and_intervals(model):
    table = model.evaluate().table()
    metrics = model.evaluate().metrics

    row = table.row(by_predicate=pl.col("metric") == "ndcg@10", named=True)
    low, high = (metrics[f"test/ndcg@10/{end}"] for end in ("low", "high"))
    assert row == {"metric": "ndcg@10", "value": metrics["test/ndcg@10"], "low": low, "high": high}
    assert table["value"].null_count() == 0
    assert model.evaluate().table("valid").height > 20
    assert f"{metrics['test/ndcg@10']:.4f}" in repr(model.evaluate())


def test_recommendations_are_frames(data, model, caplog):
    events = frame().filter(pl.col("Customer ID") == "u3").sort("bought_at")
    history = events["SKU"].to_list()

    one = model.recommend(history, k=5, explain=True, user="u3", times=events["bought_at"].to_list())
    best = model.recommend_all(data, k=5).filter(pl.col("user_id") == "u3")

    assert best["items"][0].to_list() == one["item"].to_list()
    assert best["scores"][0].to_list() == pytest.approx(one["score"].to_list(), abs=1e-5)
    assert one["title"][0] == f"Thing {one['item'][0]}"
    assert [because["event"] for because in one["because"][0]] == history
    assert any(because["drop"] for because in one["because"][0])
    assert model.recommend(["new"], k=2, explain=True)["because"][0].to_list() == [{"event": "new", "drop": 0.0}]
    assert "i3" not in model.recommend(["i2"], exclude=["i3"])["item"].to_list()
    for wrong, message in (("i3", "not 'i3'"), (None, "not None"), ({"i3", "i4"}, "oldest first, not a set")):
        with pytest.raises(ValueError, match=f"history: expected a list of ids, {message}"):
            model.recommend(wrong)
    for wrong, message in (
        ({"k": "five"}, "^k: .*integer"),
        ({"diversty": 0.3}, "^diversty: unknown key; did you mean diversity"),
        ({"filter": {"kind": "odd"}}, r"^filter\.kind\.list.*valid list"),
        ({"boost": {"kind": {3: 2}}}, r"^boost\.kind\.3"),
        ({"quota": {"kind": {"1": -1}}}, "^quota: every limit must be at least 0"),
        ({"at": "now"}, "^at: .*number"),
    ):
        with pytest.raises(ValueError, match=message):
            model.recommend(["i3"], **wrong)
    kinds = Attribute([str(item % 3) for item in range(len(model.recommender.item_ids))])
    model.recommender.attributes = Attributes({"kind": kinds})
    ranged, listed = (model.recommend(["i3"], filter={"kind": one}) for one in ({"min": 1, "max": 1}, ["1"]))
    model.recommender.attributes = Attributes({})
    assert len(listed)
    assert ranged.equals(listed)
    caplog.clear()
    model.recommend(["new", "i3"])
    model.recommend(["i3"])
    model.recommend(["new"])
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "the model knows 1 of 2 events",
        "the model knows 0 of 1 events",
    ]
    for call in (model.evaluate, model.recommend_all, seqrec.fit):
        with pytest.raises(ValueError, match=r"data: expected a Dataset, not DataFrame: Dataset\.from_frame makes one"):
            call(frame())
    with pytest.raises(ValueError, match="max_cases must be at least 0, not -1"):
        seqrec.Dataset.from_frame(frame(), max_cases=-1)


def test_the_times_of_a_history_may_be_a_column_of_pandas(data):
    model = seqrec.fit(data, "tisasrec", options=OPTIONS, finetune=QUICK)
    events = frame().filter(pl.col("Customer ID") == "u3").sort("bought_at", descending=True).to_pandas()
    events = events.sort_values("bought_at")  # whose labels fall

    found = model.recommend(events["SKU"], k=5, times=events["bought_at"])

    assert found.equals(model.recommend(events["SKU"].to_list(), k=5, times=events["bought_at"].to_list()))
    with pytest.raises(ValueError, match="times: expected a list of seconds since 1970"):
        model.recommend(["i1"], times=["2020-01-01"])


def test_a_saved_model_is_complete(data, model, tmp_path):
    model.save(tmp_path / "my-model")
    again = seqrec.load(tmp_path / "my-model")

    assert again.recommend(["i1", "i2"]).equals(model.recommend(["i1", "i2"]))
    assert figures(again.evaluate(data).metrics) == figures(model.evaluate().metrics)
    assert again.recommend_all(data).equals(model.recommend_all())
    with pytest.raises(ValueError, match=r"data: sasrec was loaded without its dataset: pass it"):
        again.evaluate()
    with pytest.raises(ValueError, match=r"folder: .*my-model is not empty: name another one"):
        model.save(tmp_path / "my-model")


def test_ids_may_be_numbers_as_in_the_log():
    log = frame().with_columns(
        pl.col("SKU").str.strip_prefix("i").cast(int), pl.col("Customer ID").str.strip_prefix("u")
    )
    model = seqrec.fit(seqrec.Dataset.from_frame(log), "markov")
    known = model.recommend(["1", "2"], exclude=["3"], allow=["3", "4", "5"], user="7")

    same = model.recommend([1, 2.0], exclude=[3.0], allow=[3, 4, 5.0], user=7.0)
    assert same.equals(known)
    assert model.recommend(torch.tensor([1, 2]), exclude=np.array([3]), allow=[3, 4, 5], user=7).equals(known)
    assert sorted(known["item"]) == ["4", "5"]


def test_a_frame_of_pandas_or_arrow_gives_the_same_split(data):
    other = seqrec.Dataset.from_frame(frame().to_pandas())
    numbered = frame().to_pandas().set_axis(range(4), axis=1)
    batch = frame().to_arrow().to_batches()[0]

    assert other.card["split_sha256"] == data.card["split_sha256"]
    assert seqrec.Dataset.from_frame(numbered, user=0, item=1, time=2).card["split_sha256"] == data.card["split_sha256"]
    assert seqrec.Dataset.from_frame(batch).card["split_sha256"] == data.card["split_sha256"]
    assert other.columns == {"user_id": "Customer ID", "item_id": "SKU", "timestamp": "bought_at"}
    assert "60 users" in repr(other)


def test_columns_and_items_can_be_named(tmp_path):
    log = frame().select(pl.col("Customer ID").alias("a"), pl.col("SKU").alias("b"), pl.col("bought_at").alias("c"))
    items = pl.DataFrame({"b": [f"i{n}" for n in range(40)], "title": [f"Label {n}" for n in range(40)]})
    items = items.with_columns(kind=pl.int_range(40) % 3)

    made = seqrec.Dataset.from_frame(log.to_arrow(), user="a", item="b", time="c", items=items, folder=tmp_path)

    assert pl.read_parquet(tmp_path / "data" / "items.parquet").row(3)[:2] == ("i3", "Label 3")
    chosen = seqrec.fit(made, "popularity").recommend(["i3"], filter={"kind": ["1"]})
    assert len(chosen)
    assert set(chosen["item"]) <= {f"i{n}" for n in range(1, 40, 3)}
    with pytest.raises(ValueError, match=r"folder=: .* belongs to other data or other flags .*: name another folder"):
        seqrec.Dataset.from_frame(log.head(100), user="a", item="b", time="c", folder=tmp_path)
    assert not list(tmp_path.glob("*.new"))
    again = seqrec.Dataset.from_frame(log, user="a", item="b", time="c", items=items, folder=tmp_path)
    assert again.card == made.card


def test_numbers_may_be_text_or_those_of_numpy(data, tmp_path):
    options = {"d_model": np.int64(16), "dropout": np.float32(0.5)}
    finetune = {"epochs": np.int64(1), "batch_size": "32", "counts": "none"}
    fitted = seqrec.fit(data, "gru4rec", options=options, finetune=finetune, folder=tmp_path)

    assert (fitted.card["options"]["d_model"], fitted.card["config"]["epochs"]) == (16, 1)
    assert yaml.safe_load((tmp_path / "params.yaml").read_text())["models"]["gru4rec"]["options"]["dropout"] == 0.5


def test_an_option_without_effect_is_named_once(caplog):
    untitled = seqrec.Dataset.from_frame(frame().drop("product_name"))
    seqrec.fit(untitled, "gru4rec", options={"attributes": ["product_name"]}, minutes=1e-4)

    assert caplog.text.count("no effect") == 1


def test_a_budget_gives_the_epochs_and_a_folder_continues(data, tmp_path):
    call = {"minutes": np.float32(0.01), "seed": np.int64(3), "options": OPTIONS, "folder": tmp_path}
    first = seqrec.fit(data, "sasrec", **call)
    weights = first.folder / "best.safetensors"
    before = weights.stat().st_mtime_ns

    assert seqrec.fit(data, "sasrec", **call).evaluate().metrics == first.evaluate().metrics
    assert weights.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"folder=: .* belongs to other data or other flags"):
        seqrec.fit(data, "sasrec", **(call | {"minutes": 2}))


def test_a_budget_and_the_epochs_of_a_pre_training(data):
    model = seqrec.fit(data, "s3rec", minutes=1e-4, pretrain={"epochs": 1})

    records = [load_checkpoint(model.folder.with_name(name)).epoch_records() for name in ("initial", "finetuned")]
    assert [len(own) for own in records] == [1, 5]
    assert records[1][-1]["step"] == 5  # short epochs
    chosen = yaml.safe_load((model.folder.parents[2] / "params.yaml").read_text())["models"]["s3rec"]["finetune"]
    assert chosen["ease_items"] == 310  # the cube root of .006 s times 5e9


def test_trainings_of_several_threads_are_those_of_one(data):
    settings = {"options": {"d_model": 16}, "finetune": {"epochs": 2, "counts": "none"}}
    fit = partial(seqrec.fit, data, "mfbpr", **settings)
    alone = fit().card["weights_sha256"]
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(fit) for _ in range(2)]
    assert [made.result().card["weights_sha256"] for made in both] == [alone, alone]


def test_a_folder_of_another_dataset_or_of_auto_is_refused(data, tmp_path):
    settings = data.params.as_dict() | {"prepare": {"sample_users": 50}}
    seqrec.Dataset.from_params(settings, folder=tmp_path)
    again = seqrec.Dataset.from_params(settings | {"finetune": {"epochs": 1}}, folder=tmp_path)
    assert again.card["counts"]["users"] == 50
    message = r"folder=: .* belongs to other data or other flags"
    with pytest.raises(ValueError, match=message):
        seqrec.Dataset.from_params(data.params.as_dict(), folder=tmp_path)
    with pytest.raises(ValueError, match=message):
        seqrec.Dataset.from_frame(frame(), folder=tmp_path)
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto/auto.json").write_text('{"request": {"minutes": 3}, "params": {}, "done": []}')
    with pytest.raises(ValueError, match="holds a run of `seqrec auto`"):
        seqrec.fit(data, "sasrec", folder=tmp_path / "auto")


def test_a_folder_that_holds_something_else_is_refused(data, tmp_path):
    (tmp_path / "events.parquet").write_text("mine")
    message = r"folder=: .* holds other files, such as events\.parquet: name a new folder"
    for call in (partial(seqrec.Dataset.from_frame, frame()), partial(seqrec.fit, data, "sasrec")):
        with pytest.raises(ValueError, match=message):
            call(folder=tmp_path)
    assert (tmp_path / "events.parquet").read_text() == "mine"
    with pytest.raises(ValueError, match=r"holds no model$"):
        seqrec.load(tmp_path)
    weights = seqrec.fit(data, "markov", folder=tmp_path / "fit").folder
    for place in (tmp_path / "fit", weights.parents[1], weights.parent):
        with pytest.raises(ValueError, match=f"{place.name} holds no model: name one of {re.escape(str(weights))}$"):
            seqrec.load(place)

    mixed = pd.DataFrame({"SKU": ["a", "b"], "x": [1, "a"]})
    with pytest.raises(ValueError, match="frame: column x cannot be read"):
        seqrec.Dataset.from_frame(frame(), items=mixed, folder=tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]  # so that a corrected call is taken

    seqrec.fit(data, "popularity", folder=tmp_path / "first")
    with pytest.raises(ValueError, match=r"folder=: .* belongs to other data or other flags"):
        seqrec.fit(data, "markov", folder=tmp_path / "first")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: seqrec.fit(data, "sasrek"), r"model: 'sasrek' is not one of sasrec, .*seqrec\.models\.register"),
        (lambda data: seqrec.fit(data, "sasrec", options={"widht": 3}), r"models\.sasrec\.options.*widht"),
        (lambda data: seqrec.fit(data, "sasrec", finetune={"epoch": 3}), r"finetune\.epoch: unknown key.*epochs"),
        (lambda data: seqrec.fit(data, "sasrec", finetune={"epochs": None}), r"finetune\.epochs"),
        (lambda data: seqrec.fit(data, "sasrec", minutes=1, finetune={"epochs": 3}), "minutes: .* leave out one"),
        (lambda data: seqrec.fit(data, "sasrec", minutes=0), "minutes must be more than 0 .*, not 0"),
        (lambda data: seqrec.fit(data, "sasrec", minutes="5"), "minutes must be of type float, not '5'"),
        (lambda data: seqrec.fit(data, "sasrec", minutes=np.ones(2)), r"minutes must be of type float, not \[1\.0, 1"),
        (lambda data: seqrec.fit(data, "sasrec", minutes=float("inf")), "minutes must be a finite number, not inf"),
        (lambda data: seqrec.fit(data, "sasrec", finetune={"epochs": Path("x")}), r"finetune\.epochs: "),
        (lambda data: seqrec.fit(data, "s3rec", minutes=1), "minutes: s3rec is pre-trained first: set pretrain="),
        (lambda data: seqrec.fit(data, "recguru", minutes=1), "minutes: recguru is pre-trained first"),
        (lambda data: seqrec.fit(data, "s3rec", pretrain={"epoch": 1}), r"pretrain\.epoch: unknown key.*epochs"),
        (
            lambda data: seqrec.fit(data, "sasrec", pretrain={"epochs": 9}),
            r"pretrain\.epochs: sasrec is not pre-trained",
        ),
        (
            lambda _: seqrec.fit(seqrec.Dataset.from_frame(frame().drop("product_name")), "recformer"),
            "recformer reads the text of items; pass `items` or `title`",
        ),
        (lambda data: seqrec.fit(data, "popularity").recommend_all(k=0), "k must be at least 1, not 0"),
        (lambda data: seqrec.fit(data, "popularity").recommend_all(k=2.5), "k must be of type int, not 2.5"),
        (lambda data: seqrec.fit(data, "popularity").evaluate().table("train"), "split must be one of test, valid"),
        (lambda _: seqrec.Dataset.from_frame(frame().head(3)), "critical rules failed.*folder was temporary: folder="),
        (lambda data: seqrec.fit(data, "popularity", folder=__file__), "folder: .* is a file, but must be a folder"),
        (lambda data: seqrec.fit(data, "popularity", folder=f"{__file__}/x"), "folder: .* is a file, but must be"),
        (lambda _: seqrec.Dataset.from_frame([1, 2]), "frame: expected a table of polars, pandas or Arrow, not list"),
        (lambda _: seqrec.Dataset.from_frame(frame().select("SKU", "bought_at")), "user_id; name it with user="),
        (
            lambda _: seqrec.Dataset.from_frame(pd.DataFrame([[1, 2, 3]], columns=["user", "item", "item"])),
            "frame: give each column its own name .*'item' 2 times",
        ),
        (
            lambda _: seqrec.Dataset.from_frame(pd.DataFrame({"user": [1, 2], "item": ["a", 2]})),
            r"frame: column item cannot be read \(.*\): give its values one type",
        ),
        (
            lambda _: seqrec.Dataset.from_frame(pl.DataFrame({"user": [uuid4()], "item": [1]})),
            "frame: column user holds objects of Python: make it text",
        ),
        (
            lambda _: seqrec.Dataset.from_frame(pd.DataFrame({"user": [2**70, 1], "item": [1, 2]}, dtype=object)),
            r"frame: column user cannot be read \(.*\): give its values one type",
        ),
        (lambda _: seqrec.Dataset.from_frame(frame(), time="SKU"), "another column with time="),
        (lambda _: seqrec.models.register("sasrec", GRU4Rec), "'sasrec' is taken by .*SASRec: choose another one"),
        (lambda _: seqrec.models.register("mine", dict), "is not a subclass of seqrec.models.SequenceModel"),
        (lambda _: seqrec.models.register("cell", CELL), r"Cell is not defined in a file: move it to .* mine\.py"),
    ],
)
def test_errors_name_what_to_change(data, call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(data)


def test_no_baseline_is_trained_in_place_of_an_own_model_of_its_name(data, monkeypatch):
    monkeypatch.setattr(REGISTRY, "data", REGISTRY.data | {"ease": GRU4Rec})
    with pytest.raises(ValueError, match="model: ease is a baseline: register your class under another name"):
        seqrec.fit(data, "ease")


def test_a_notebook_shows_the_progress_as_a_terminal_does(monkeypatch, capsys):
    assert ProgressBar("epoch", 2, shown=True).disable
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with ProgressBar("epoch", 2, shown=True) as bar:
        bar.update(bar.steps, completed=3, total=10, description="epoch 1")
        bar.refresh()

    assert "epoch 1" in capsys.readouterr().err


def test_the_package_has_the_names_that_it_lists_and_no_other():
    assert set(seqrec.__all__) <= {name for name in seqrec.__all__ if getattr(seqrec, name)}
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = seqrec.nothing


def value_of(cell, names):
    """Run a cell; return the value of its last line if that is an expression."""
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    cells = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "library.md").read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(REGISTRY, "data", dict(REGISTRY.data))  # the page's own model leaves with the test
    names: dict = {}

    values = []
    for cell in cells:
        if cell.startswith("%%writefile "):
            first, _, text = cell.partition("\n")
            Path(first.split()[1]).write_text(text)
        else:
            values.append(value_of(cell, names))

    shown = dict(zip(("events", "data", "table", "best", "again", "mean", "metric", "ends"), values, strict=True))
    assert "150 users" in repr(shown["data"])
    assert shown["best"].columns == ["item", "title", "score", "because"]
    assert shown["metric"] == pytest.approx((1 + 0.5) / 3)
    assert [part.tolist() for part in shown["ends"]] == [[2, 1], [3, 2]]
    assert pl.read_parquet("top10.parquet").height == 150
