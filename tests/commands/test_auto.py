"""`seqrec auto`: from a file with columns of its own to a leaderboard, a report and a command that serves."""

from __future__ import annotations

import json
import logging
import time
from functools import partial

import polars as pl
import pytest
from rich.console import Console
from support import synthetic_rows

from seqrec.__main__ import main
from seqrec.commands import auto, auto_data, auto_training
from seqrec.commands.auto_plan import Plan
from seqrec.config import load
from seqrec.data import data_warnings, sequences
from seqrec.serving.recommender import Recommender, Request
from seqrec.training import auto_settings
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.cost import Cost

COLUMNS = ("Customer ID", "SKU", "bought_at", "product_name")
SHARE = 0.005  # minutes: one epoch of one model
QUICK = {"epochs": 1, "counts": "none"}  # the search for counts takes longer than an epoch


def write_log(path, *, spread, users=60):
    """Write a log of `users`, who begin `spread` seconds after one another."""
    values = [
        (user, item, 1_500_000_000 + 360 * (time - 1_000_000) + spread * int(user[1:]), f"Thing {item}")
        for user, item, time in synthetic_rows(users=users, items=40)
    ]
    pl.DataFrame(values, schema=COLUMNS, orient="row").write_csv(path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with log.csv of 300 users, and what `auto --out out` has made of it."""
    folder = tmp_path_factory.mktemp("auto")
    log = write_log(folder / "log.csv", spread=0, users=300)
    assert main(["auto", "--data", str(log), "--minutes", str(SHARE), "--out", str(folder / "out")]) == 0
    return folder


def test_a_log_becomes_a_leaderboard_a_report_and_a_model_that_answers(made, capsys):
    out = made / "out"
    board = json.loads((out / "reports" / "leaderboard.json").read_text())
    card = sequences.load(out / "data" / "sequences").card
    params = load(out / "params.yaml")

    assert card["protocol"] == "temporal"
    assert params.section("ingest").columns == {"user_id": "Customer ID", "item_id": "SKU", "timestamp": "bought_at"}
    assert {"markov", "pctm", "seqrules", "flash4rec"} <= {row["model"] for row in board["rows"]}
    assert board["verdict"]["model"] == "flash4rec"
    assert board["verdict"]["sentence"] in (out / "reports" / "index.html").read_text()
    assert any("only 300 users" in sentence for sentence in board["warnings"])
    winner = board["rows"][0]["model"]
    assert (out / "model-card.md").read_text().startswith(f"# {winner} on auto")
    assert main(["leaderboard", "--reports", str(out / "reports")]) == 0
    place = out / "artifacts" / winner / "finetuned"
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"serve --params {out}/params.yaml --saved {place}")
    answerer = Recommender.load(place, params.section("register"))
    assert len(answerer.answer([Request(history=["i3", "i4"], k=5)])[0].items) == 5
    assert answerer.titles["i3"] == "Thing i3"


def test_the_same_command_continues_and_another_one_is_refused(made, caplog):
    out, weights = made / "out", made / "out" / "artifacts" / "flash4rec" / "finetuned" / "best.safetensors"
    before = weights.stat().st_mtime_ns
    command = ["auto", "--data", str(made / "log.csv"), "--out", str(out), "--minutes"]

    assert main([*command, str(SHARE)]) == 0
    assert weights.stat().st_mtime_ns == before
    assert main([*command, str(SHARE), "--title", "Name"]) == 1
    assert "belongs to other data or other flags (columns)" in caplog.text
    log = (made / "log.csv").read_bytes()
    (made / "log.csv").write_bytes(log.replace(b"i3", b"i4", 1))
    caplog.clear()
    assert main([*command, str(SHARE)]) == 1
    assert "belongs to other data or other flags" in caplog.text
    (made / "log.csv").write_bytes(log)


def test_a_folder_of_other_files_is_left_alone(made, tmp_path, caplog):
    (tmp_path / "params.yaml").write_text("mine")

    assert main(["auto", "--data", str(made / "log.csv"), "--out", str(tmp_path)]) == 1
    assert "holds other files, such as params.yaml: name a new folder" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["params.yaml"]


def test_a_run_that_has_not_begun_may_get_other_flags(tmp_path):
    Plan(tmp_path / "auto.json", {"columns": {}}).save()

    assert Plan.load(tmp_path / "auto.json", {"columns": {"user_id": "a"}}).request == {"columns": {"user_id": "a"}}


def test_a_plan_keeps_what_was_done_when_it_gets_more_minutes(tmp_path):
    Plan(tmp_path / "auto.json", {"data": "a", "minutes": 1.0}, spent=40.0).save("counts")

    plan = Plan.load(tmp_path / "auto.json", {"data": "a", "minutes": 3.0}, free=["minutes"])

    assert plan.done == ["counts"]
    assert plan.left() == pytest.approx(140, abs=5)


def test_the_time_of_an_interrupted_step_counts(made, tmp_path, monkeypatch):
    kept = json.loads((made / "out" / "auto.json").read_text())
    kept["params"] |= {"models": {}, "leaderboard": []}
    (tmp_path / "auto.json").write_text(json.dumps(kept | {"done": ["data"], "spent": 7.0}))
    (tmp_path / "data").symlink_to(made / "out" / "data")

    def interrupted(*_, **__):
        time.sleep(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(auto.run, "evaluate_baselines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto.auto(data=made / "log.csv", out=tmp_path, minutes=5.0)

    assert json.loads((tmp_path / "auto.json").read_text())["spent"] >= 7.3


@pytest.fixture
def planned(made, tmp_path):
    """A plan of the settings that were made, without models, for 100 minutes; the folder and shape of the data."""
    params = json.loads((made / "out" / "auto.json").read_text())["params"]
    own = params | {"models": {}, "evaluate": {"bootstrap": 100}}
    folder = made / "out" / "data" / "sequences"
    plan = Plan(tmp_path / "auto.json", {"minutes": 100.0}, own)
    return plan, folder, auto.Shape.of(sequences.load(folder))


@pytest.mark.parametrize(
    ("epoch_s", "spent", "baselines_s", "first", "epochs", "steps"),
    [
        (40.0, 0, 0.0, True, 100, 100),  # all epochs take more than an equal share of the time, but fit
        (600.0, 0, 0.0, True, 8, 100),  # all that is left
        (600.0, 0, 4000.0, True, 6, 100),  # counts of a model take about as long as those of the baselines
        (40.0, 5860, 0.0, True, 5, 59),  # too few whole epochs fit
        (4000.0, 0, 0.0, True, 5, 25),
        (40000.0, 0, 0.0, True, 5, 20),  # the first model gets so many in any case
        (600.0, 0, 0.0, False, 0, 0),  # less than a quarter of them would do a further model no good
        (160.0, 0, 0.0, False, 31, 100),
    ],
)
def test_a_model_gets_all_epochs_that_fit_before_the_next_one_gets_any(
    planned, tmp_path, monkeypatch, caplog, epoch_s, spent, baselines_s, first, epochs, steps
):
    monkeypatch.setattr(
        auto_training, "_cost", lambda *_: Cost(step_s=epoch_s / 100, steps=100, validation_s=0.0, memory=0)
    )
    plan, folder, shape = planned
    plan.spent, plan.baselines_s = spent, baselines_s
    plan.params["models"] = {} if first else {"gru4rec": auto_training.model_settings("gru4rec", shape, {})}
    assert auto_settings.finetune(shape, {})["epochs"] == 100

    with caplog.at_level("WARNING"):
        entry = auto_training.model_settings("sasrec", shape, {})
        fit = auto_training._fit(plan, "sasrec", entry, folder, tmp_path, 2000)

    limits = fit.limits if fit else {"epochs": 0, "epoch_steps": 0}
    assert (limits["epochs"], limits.get("epoch_steps", 100)) == (epochs, pytest.approx(steps, abs=1))
    assert ("the run takes longer" in caplog.text) == (epoch_s > 10_000)


@pytest.mark.parametrize(("share", "most", "expected"), [(30.0, 5, 2), (1e6, 1, 1)])
def test_few_users_get_the_mean_of_as_many_networks_as_the_share_holds(
    planned, tmp_path, monkeypatch, share, most, expected
):
    monkeypatch.setattr(auto_training, "_cost", lambda *_: Cost(step_s=10.0, steps=1, validation_s=0.0, memory=0))
    plan, folder, shape = planned
    settings = partial(auto_training.model_settings, "sasrec", shape, options={"d_model": 8}, finetune=QUICK)

    auto_training.train(plan, "sasrec", settings, folder, tmp_path, share=share, members=most)

    assert len(load_checkpoint(tmp_path / "artifacts" / "sasrec" / "finetuned").model.parts) == expected


def test_whether_items_have_text(made, tmp_path):
    data = made / "out" / "data"
    for name in ("sequences", "items.parquet"):
        (tmp_path / name).symlink_to(data / name)
    assert auto_data.has_texts(tmp_path / "sequences")
    (tmp_path / "items.parquet").unlink()
    ids = pl.read_parquet(data / "items.parquet", columns=["item_id"])
    ids.with_columns(title=pl.lit("")).write_parquet(tmp_path / "items.parquet")
    assert not auto_data.has_texts(tmp_path / "sequences")


def test_the_model_that_reads_text_is_trained_on_item_vectors_of_mean_words(planned, tmp_path):
    plan, folder, shape = planned
    settings = partial(auto_training.model_settings, "recformer", shape, finetune=QUICK)

    auto_training.train(plan, "recformer", settings, folder, tmp_path)

    model = load_checkpoint(tmp_path / "artifacts" / "recformer" / "finetuned").model
    assert (model.options.encoder, model.options.layers, len(model.encoder.blocks)) == ("items", 0, 0)


def prepared(folder, log, items="", **columns):
    """The plan and the split card of `log`."""
    request = {"data": str(log), "columns": columns, "time_format": "", "items": str(items), "minutes": 1.0}
    plan = Plan.load(folder / "auto.json", request)
    auto_data.prepare(plan, folder / "out", Console(quiet=True))
    data = sequences.load(folder / "out" / "data" / "sequences")
    auto_data.say_data(plan, data, folder / "out")
    return plan, data.card


FUTURE = pl.when(pl.int_range(pl.len()) % 50 == 0).then(4_102_358_400).otherwise("bought_at")
DAYS = (pl.col("bought_at") - 1_500_000_000) // 86_400  # since the first one: an order, but no times


@pytest.mark.parametrize(
    ("spread", "times", "reason"),
    [
        (8_000_000, "bought_at", "of the validation cases belong to users with events before"),  # one after the other
        (0, FUTURE, "times are in the future"),
        (0, DAYS, "the file has no times"),
    ],
)
def test_a_log_that_time_cannot_divide_is_split_by_user(tmp_path, caplog, spread, times, reason):
    caplog.set_level(logging.INFO)
    log = write_log(tmp_path / "log.csv", spread=spread)
    pl.read_csv(log).with_columns(bought_at=times).write_csv(log)

    plan, card = prepared(tmp_path, log, timestamp="bought_at")

    assert card["protocol"] == "LOO-full"
    assert reason in plan.split
    assert "max_cases" not in plan.params["prepare"]
    assert "random cases of each are ranked" not in caplog.text


def test_a_log_from_the_newest_event_to_the_oldest_keeps_this_order_within_a_time(tmp_path):
    rows = pl.read_csv(write_log(tmp_path / "log.csv", spread=0)).sort("bought_at")
    rows = rows.with_columns(pl.col("bought_at") // 2_000_000 * 2_000_000)
    rows = rows.unique(COLUMNS[:3], keep="first", maintain_order=True)

    found = []
    for name, table in (("oldest", rows), ("newest", rows.reverse())):
        table.write_csv(tmp_path / f"{name}.csv")
        plan, card = prepared(tmp_path / name, tmp_path / f"{name}.csv")
        assert plan.params["prepare"].get("newest_first", False) is (name == "newest")
        assert card["counts"]["tied_events"] > 0
        folder = tmp_path / name / "out" / "data" / "sequences"
        data, items = sequences.load(folder), sequences.read_items(folder)
        histories = [data.items[first:stop].tolist() for first, stop in zip(data.start, data.stop, strict=True)]
        found.append(sorted([items[item - 1] for item in history] for history in histories))

    assert found[0] == found[1]


def test_headlines_of_reviews_are_no_titles(tmp_path, caplog):
    rows = pl.read_csv(write_log(tmp_path / "log.csv", spread=0))
    path = tmp_path / "log.csv"
    rows.with_columns(title=pl.format("Great {}", pl.int_range(pl.len()))).write_csv(path)

    assert auto_data._titles(path, COLUMNS[1], "title", tmp_path) is None
    assert "title is not read as the title: items have several of them" in caplog.text
    assert auto_data._titles(path, COLUMNS[1], COLUMNS[3], tmp_path) is not None


@pytest.mark.parametrize(("scores", "events"), [(1, 1e9), (1e9, 1)])
def test_a_large_log_is_ranked_on_a_sample_of_cases(tmp_path, caplog, monkeypatch, scores, events):
    monkeypatch.setattr(auto_data, "SCORES", scores)
    monkeypatch.setattr(auto_data, "EVENTS", events)
    monkeypatch.setattr(auto_data, "LEAST_CASES", 25)

    caplog.set_level(logging.INFO)

    plan, card = prepared(tmp_path, write_log(tmp_path / "log.csv", spread=8_000_000))

    assert card["max_cases"] == plan.params["prepare"]["max_cases"] == 25
    assert "25 random cases of each are ranked" in caplog.text


def test_imperfect_rows_are_left_out_with_a_sentence(tmp_path, caplog):
    rows = pl.read_csv(write_log(tmp_path / "log.csv", spread=0))
    number = pl.int_range(pl.len())
    missing = rows.with_columns(pl.when(number % 5 > 0).then("Customer ID").alias("Customer ID"))
    odd = rows.head(60).with_columns(pl.when(number % 30 > 0).then("bought_at").otherwise(0).alias("bought_at"))
    pl.concat([rows, rows, missing, odd]).write_csv(tmp_path / "log.csv")

    _, card = prepared(tmp_path, tmp_path / "log.csv")

    bad = -(-len(rows) // 5)
    assert f"{bad} malformed rows are left out; the most common reason: no user_id" in caplog.text
    assert "2 of " in caplog.text
    assert "times are not between 1990 and 2035, such as 1970-01-01" in caplog.text
    assert card["dropped"]["duplicate events"] == 2 * len(rows) - bad + 58
    assert card["k_core"]["user"] == 5
    assert "of the events repeat the user, item and time" in " ".join(data_warnings.warnings(card))


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ("0", "10 of 100 times are not between 1990 and 2035, such as 1970-01-01: name another column with --time"),
        ("soon", "10 of 100 times cannot be read: timestamp is neither .*--time-format, or name another .* --time"),
        ("", r"malformed.*quarantine\.parquet\.\n[^\n]*--user, --item, --time, --time-format"),
    ],
)
def test_a_wrong_column_names_the_flags(tmp_path, time, message):
    share = 10 if time else 2
    rows = [(f"u{n % 9}", f"i{n % 8}", time if n % share == 0 else f"{1_600_000_000 + n}") for n in range(100)]
    pl.DataFrame(rows, schema=["user", "item", "time"], orient="row").write_csv(tmp_path / "log.csv")

    with pytest.raises(ValueError, match=f"(?s){message}"):
        prepared(tmp_path, tmp_path / "log.csv")


@pytest.mark.parametrize("events", [1, 3])
def test_users_with_too_few_events_name_the_flag(tmp_path, events):
    rows = [(f"u{n // events}", f"i{n % 8}", 1_600_000_000 + 3600 * n) for n in range(200)]
    pl.DataFrame(rows, schema=["user", "item", "time"], orient="row").write_csv(tmp_path / "log.csv")

    with pytest.raises(ValueError, match=r"no user has four events .* --user"):
        prepared(tmp_path, tmp_path / "log.csv")


def test_an_items_file_may_have_columns_of_its_own_and_a_folder_the_name_of_a_pattern(tmp_path):
    folder, log = tmp_path / "a[1]", write_log(tmp_path / "log.csv", spread=0)
    pl.DataFrame({"code": [f"i{n}" for n in range(40)], "label": [f"Label {n}" for n in range(40)]}).write_csv(
        tmp_path / "items.csv"
    )

    _, card = prepared(folder, log, items=tmp_path / "items.csv", title="label")

    assert card["counts"]["users"] == 60
    items = pl.read_parquet(folder / "out" / "data" / "items.parquet", glob=False)
    assert items.row(3)[:2] == ("i3", "Label 3")


def test_titles_are_found_by_ids_that_a_program_has_written_as_fractions(tmp_path):
    rows = [(float(n % 30), float(n % 12), 1_600_000_000 + 3600 * n, f"Thing {n % 12}") for n in range(600)]
    pl.DataFrame(rows, schema=["user", "item", "time", "title"], orient="row").write_parquet(tmp_path / "log.parquet")

    prepared(tmp_path, tmp_path / "log.parquet")

    assert pl.read_parquet(tmp_path / "out" / "data" / "items.parquet").row(3)[:2] == ("3", "Thing 3")


@pytest.mark.parametrize(("column", "rating"), [("rating", "PG-13"), ("stars", "4,5")])
def test_no_event_is_lost_for_its_rating_and_no_title_for_the_rows_without_it(tmp_path, column, rating):
    log = write_log(tmp_path / "log.csv", spread=0)
    rows, first = pl.read_csv(log), pl.int_range(pl.len()).over("SKU") < 2
    title = pl.when(~first).then("product_name").alias("product_name")
    rows.with_columns(title, pl.lit(rating).alias(column)).write_csv(log)

    _, card = prepared(tmp_path, log)

    assert card["counts"]["events"] == len(rows)
    assert pl.read_parquet(tmp_path / "out" / "data" / "items.parquet")["title"].null_count() == 0


@pytest.mark.parametrize("flags", [["--title", "name"], ["--time-format", "%Y"]])
def test_a_flag_for_what_lines_do_not_have_is_refused(tmp_path, caplog, flags):
    (tmp_path / "lines.txt").write_text("".join(f"u{user} i1 i2 i3 i4\n" for user in range(20)))

    assert main(["auto", "--data", str(tmp_path / "lines.txt"), "--out", str(tmp_path / "out"), *flags]) == 1

    assert f"{flags[0]}: lines.txt has lines of `user item item ...`, without times and titles" in caplog.text


def test_lines_without_times_are_split_by_user(tmp_path):
    log, items = tmp_path / "lines.txt", tmp_path / "items.csv"
    log.write_text("".join(f"{user} {' '.join(str((user + k) % 12) for k in range(8))}\n" for user in range(40)))
    pl.DataFrame({"sku": range(12), "name": [f"Thing {n}" for n in range(12)]}).write_csv(items)

    plan, _ = prepared(tmp_path, log, items=items)

    assert pl.read_parquet(tmp_path / "out" / "data" / "items.parquet").row(3)[:2] == ("3", "Thing 3")
    assert plan.split.endswith("the file has no times")
    assert plan.params["prepare"]["protocol"] == "LOO-full"
