"""A champion trained once more on every event: what it has seen, what it is not measured on, and who is served."""

import json
import logging
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from support import case_table, interrupted, run, weights

from seqrec.artifacts import MODEL_CARD, REFITTED, read_json, sha256, write_json
from seqrec.commands import refit as command
from seqrec.config import ConfigError, EvaluateConfig, RegisterConfig, from_dict
from seqrec.counts.term import with_counts
from seqrec.data import sequences
from seqrec.evaluation import ranking, results
from seqrec.evaluation.metrics import SELECTION
from seqrec.locks import LockedError
from seqrec.pipeline import BY_NAME
from seqrec.serving.recommender import Recommender
from seqrec.stages.evaluate import evaluate
from seqrec.tracking import gate, registry, runs
from seqrec.tracking.runs import TrackingError
from seqrec.training import refit
from seqrec.training.checkpoint import load_checkpoint, save_model
from seqrec.training.warm_start import warm_start


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A SASRec whose second epoch of four was the best, as its history has it."""
    folder = tmp_path_factory.mktemp("trained") / "sasrec"
    torch.manual_seed(0)
    run(prepared, folder, save_steps=1)
    lines = load_checkpoint(folder / "finetuned").epoch_records()
    for line, value in zip(lines, (0.1, 0.3, 0.2, 0.3), strict=True):
        line[SELECTION] = value
    (folder / "finetuned" / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card, digest = folder / "finetuned" / "config.json", sha256(folder / "finetuned" / "history.jsonl")
    write_json(card, read_json(card) | {"history_sha256": digest})
    return folder


def retrain(prepared, trained, out, **more):
    folders = {"initial": trained / "initial", "finetuned": load_checkpoint(trained / "finetuned")}
    paths = {"refitted": out / "refitted", "state": out / "state"}
    return refit.retrain(model="sasrec", sequences=prepared, **folders, **paths, **more)


@pytest.mark.parametrize(
    ("history", "epochs"),
    [
        ([("a", 1, 0.1), ("a", 2, 0.3), ("b", 1, 0.2), ("b", 2, 0.3)], {"a": 2, "b": 0}),  # b never got better
        ([("a", 1, 0.1), ("a", 2, 0.3), ("b", 1, 0.2), ("b", 2, 0.4)], {"a": 2, "b": 2}),
        ([("a", 1), ("a", 2, 0.1), ("a", 3)], {"a": 2}),  # not every epoch is evaluated
    ],
)
def test_the_epochs_are_those_whose_weights_were_kept(history, epochs):
    lines = [dict(zip(("phase", "epoch", SELECTION), values, strict=False)) for values in history]

    assert refit.chosen_epochs(lines) == epochs


@pytest.fixture(scope="module")
def retrained(prepared, trained, tmp_path_factory):
    """The training once more on every event, and what it returns."""
    out = tmp_path_factory.mktemp("retrained")
    return out / "refitted", retrain(prepared, trained, out)


def test_it_stops_at_the_chosen_epoch_of_the_same_schedule_and_measures_nothing(data, trained, retrained):
    folder, values = retrained

    again, before = (load_checkpoint(place) for place in (folder, trained / "finetuned"))
    assert values["epochs"] == len(again.epoch_records()) == 2
    assert not any(name.startswith("valid/") for record in again.epoch_records() for name in record)
    rates = [[record["learning_rate"] for record in one.epoch_records()] for one in (again, before)]
    assert rates[0] == pytest.approx(rates[1][:2], rel=0.1)  # an epoch has a few more batches
    assert rates[0][1] > 3 * rates[1][3]  # not run down to the end within two epochs
    assert again.card["refit"] == {"fingerprint": before.card["fingerprint"], "epochs": {"train": 2}, "until": "test"}
    assert again.card["config"] == before.card["config"]
    assert again.item_counts.sum() == len(data.items)


def test_a_killed_refit_continues_and_gives_the_same_weights(prepared, trained, retrained, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    with interrupted(3):
        retrain(prepared, trained, tmp_path)
    retrain(prepared, trained, tmp_path)
    assert "resuming" in caplog.text
    assert "epoch 2/2" in caplog.text  # two are trained, of the schedule for four

    ours, theirs = (load_checkpoint(place).model.state_dict() for place in (retrained[0], tmp_path / "refitted"))
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert not torch.equal(ours["items.weight"], weights(trained)["items.weight"])


def test_what_has_seen_the_test_events_is_neither_evaluated_nor_started_from(prepared, trained, retrained, tmp_path):
    folder, _ = retrained
    shared = {"model": "sasrec", "report": tmp_path, "config": EvaluateConfig()}

    with pytest.raises(ValueError, match="refitted on the cases that it would rank"):
        evaluate(**shared, sequences=prepared, checkpoint=folder)
    with pytest.raises(ValueError, match="refitted on every event"):
        warm_start(load_checkpoint(trained / "initial").model, prepared, folder)
    split = tmp_path / "another split"
    shutil.copytree(prepared, split)
    card = read_json(split / "split.json")
    write_json(split / "split.json", card | {"split_sha256": "another", "protocol": "RATIO-full"})
    with pytest.raises(ValueError, match=r"may have been trained on the cases of .*prepare\.protocol LOO-full"):
        evaluate(**shared, sequences=split, checkpoint=trained / "finetuned")


def test_a_refit_until_the_validation_events_sees_those_and_no_test_event(prepared, data, trained, tmp_path):
    retrain(prepared, trained, tmp_path, until="valid")

    counts = load_checkpoint(tmp_path / "refitted").item_counts
    assert counts.sum() == int((data.valid_stop - data.start).sum())
    seen = sequences.trained_until(data, data.valid_stop)
    assert (seen.train_stop == data.valid_stop).all()
    assert (seen.stop == data.stop).all()
    test = torch.cat([data.items[i:j] for i, j in zip(data.valid_stop, data.stop, strict=True)])
    assert (data.items.bincount() - seen.count == test.bincount(minlength=len(seen.count))).all()


@pytest.fixture(scope="module")
def refitted_too(prepared, tmp_path_factory):
    """A training with counts under `evaluate.refit: valid`."""
    folder = tmp_path_factory.mktemp("refitted") / "sasrec"
    run(prepared, folder, refit="valid", counts={"alpha": 0.5})
    return folder / "finetuned"


@pytest.mark.parametrize("without_counts", [True, False])
def test_test_cases_are_ranked_by_the_refit_and_validation_cases_are_not(
    prepared, refitted_too, tmp_path, without_counts
):
    shared = {"model": "sasrec", "sequences": prepared, "checkpoint": refitted_too, "without_counts": without_counts}
    plain = evaluate(**shared, report=tmp_path / "plain", config=EvaluateConfig())
    both = evaluate(**shared, report=tmp_path / "both", config=EvaluateConfig(refit="valid"))

    refitted = load_checkpoint(refitted_too / REFITTED)
    scorer = ranking.model_scorer(refitted.model)
    if not without_counts:
        scorer = with_counts(scorer, refitted.count_term)
    data = sequences.load(prepared)
    count = sequences.trained_until(data, data.valid_stop).count
    expected = results.report(scorer, data, tmp_path / "alone", EvaluateConfig(), {}, count=count)
    for name, value in both.items():
        if name.startswith("test/"):
            assert value == expected[name], name
        elif name.startswith("valid/"):
            assert value == plain[name], name
    assert (plain["refit"], both["refit"]) == (0, 1)
    assert both["test/mrr"] != plain["test/mrr"]


def test_a_refit_that_is_missing_or_of_other_weights_is_refused(prepared, trained, refitted_too, tmp_path):
    shared = {"model": "sasrec", "sequences": prepared, "report": tmp_path, "config": EvaluateConfig(refit="valid")}
    with pytest.raises(ValueError, match=r"evaluate\.refit: .*run finetune"):
        evaluate(**shared, checkpoint=trained / "finetuned")
    other = tmp_path / "other"
    shutil.copytree(trained / "finetuned", other)
    shutil.copytree(refitted_too / REFITTED, other / REFITTED)
    with pytest.raises(ValueError, match="is not a refit of"):
        evaluate(**shared, checkpoint=other)


def test_a_training_without_a_refit_keeps_none_of_an_earlier_call(prepared, refitted_too, tmp_path):
    shutil.copytree(refitted_too.parent, tmp_path / "sasrec")
    run(prepared, tmp_path / "sasrec", counts={"alpha": 0.5})

    assert not (tmp_path / "sasrec" / "finetuned" / REFITTED).exists()


def test_refit_is_a_setting_of_evaluate_alone():
    content = {"dataset": "toy", "models": {"sasrec": {}}, "evaluate": {"refit": "valid"}}

    assert BY_NAME["finetune"].settings(from_dict(content), "sasrec")["refit"] == "valid"
    with pytest.raises(ConfigError, match=r"^evaluate.refit: Input should be .none. or .valid."):
        from_dict(content | {"evaluate": {"refit": "test"}})


@pytest.fixture
def registered(prepared, trained, tmp_path):
    """A champion of which `artifacts` holds the folders; its client, settings and cases."""
    shutil.copytree(trained, tmp_path / "artifacts" / "sasrec")
    config = RegisterConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="mine", graph=False)
    client = runs.connect(config)
    version = register(client, config, tmp_path / "artifacts" / "sasrec" / "finetuned", prepared, 2.0)
    assert gate.promote(client, version, cases(2.0), tmp_path, config).promoted
    return client, config, version


def cases(rank):
    return case_table(*[rank] * 8)


def register(client, config, folder, prepared, rank):
    """What the stage does with the best model, every validation case of which has `rank`."""
    run_ = runs.open_run(client, runs.experiment(client, config), read_fingerprint(folder), "sasrec")
    pq.write_table(cases(rank), folder / "cases.parquet")
    client.log_artifact(run_.info.run_id, str(folder / "cases.parquet"), registry.REPORT)
    model = registry.log_model(client, run_, checkpoint=load_checkpoint(folder))
    split = read_json(prepared / "split.json")["split_sha256"]
    tags = {registry.SPLIT_TAG: split, registry.FILTER_TAG: "1", "seqrec.model": "sasrec"}
    return registry.create_version(client, "seqrec-toy", model, tags, "# the card of the evaluated one")


def read_fingerprint(folder):
    return read_json(folder / "config.json")["fingerprint"]


def test_the_refit_is_served_and_the_evaluated_version_stands_for_it(prepared, registered, tmp_path):
    client, config, evaluated = registered
    given = {"dataset": "toy", "artifacts": tmp_path / "artifacts", "sequences": prepared, "state": tmp_path / "state"}

    with runs.registering(config, "toy"), pytest.raises(LockedError, match="registering models of toy"):
        command.refit(**given, config=config)
    assert not (tmp_path / "state").exists()  # nothing was trained in vain
    assert command.refit(**given, config=config)["version"] == 2
    assert command.refit(**given, config=config)["version"] == 2  # once more changes nothing

    champion = registry.find_champion(client, "seqrec-toy")
    assert (int(champion.version), registry.find_evaluated(client, "seqrec-toy").version) == (2, evaluated.version)
    assert champion.tags[registry.REFIT_TAG] == "1"
    assert registry.champion_history(client.get_registered_model("seqrec-toy"))[:2] == ["2", "1"]
    assert champion.tags[registry.SPLIT_TAG] == evaluated.tags[registry.SPLIT_TAG]
    assert champion.tags[registry.WEIGHTS_TAG] != evaluated.tags[registry.WEIGHTS_TAG]
    assert champion.description.startswith("**A refit of version 1 on every event")
    assert champion.description.endswith("# the card of the evaluated one")
    assert client.get_run(champion.run_id).data.params["refit.epochs.train"] == "2"
    served = Recommender.load("models:/seqrec-toy@champion", config)
    refitted = load_checkpoint(tmp_path / "artifacts" / "sasrec" / "refitted").model
    assert torch.equal(served.engine.model.items.weight, refitted.items.weight)
    assert served.counts.sum() == len(sequences.load(prepared).items)
    registry.fetch_champion(dataset="toy", folder=tmp_path / "start", config=config)
    assert read_fingerprint(tmp_path / "start") == read_fingerprint(tmp_path / "artifacts" / "sasrec" / "finetuned")

    evaluated = client.get_model_version("seqrec-toy", "1")
    again = gate.promote(client, evaluated, cases(2.0), tmp_path, config)
    assert again == gate.Decision(True, "version 2, its refit, is served; there was no champion before", None)
    assert int(registry.find_champion(client, "seqrec-toy").version) == 2
    changed(tmp_path / "artifacts" / "sasrec" / "finetuned", tmp_path / "other")
    better = register(client, config, tmp_path / "other", prepared, 1.0)
    decision = gate.promote(client, better, cases(1.0), tmp_path, config)
    assert decision.promoted
    assert "over version 2: +0.3691" in decision.reason  # 1 - 1 / log2(3): with the cases of the evaluated one

    refitted = client.get_model_version("seqrec-toy", "2")
    registry.crown(client, evaluated, refitted, "rollback by hand", back=True)
    with pytest.raises(TrackingError, match="version 2 of seqrec-toy, this refit, was rolled back"):
        command.refit(**given, config=config)
    assert int(registry.find_champion(client, "seqrec-toy").version) == 1


def changed(folder, to):
    """Save a checkpoint with other weights."""
    trained = load_checkpoint(folder)
    with torch.no_grad():
        trained.model.items.weight.add_(1.0)
    save_model(to, trained.model, {**trained.card, "fingerprint": "other"}, trained.files)


def test_only_the_champions_own_folders_are_refitted(prepared, registered, tmp_path):
    _, config, _ = registered
    given = {"artifacts": tmp_path / "artifacts", "state": tmp_path / "state", "config": config}

    with pytest.raises(ConfigError, match="seqrec-never has no champion"):
        command.refit(dataset="never", sequences=prepared, **given)
    split = tmp_path / "split"
    shutil.copytree(prepared, split)
    write_json(split / "split.json", read_json(split / "split.json") | {"split_sha256": "another"})
    with pytest.raises(ConfigError, match="split_sha256 differs"):
        command.refit(dataset="toy", sequences=split, **given)
    finetuned = tmp_path / "artifacts" / "sasrec" / "finetuned"
    card = read_json(finetuned / MODEL_CARD)
    write_json(finetuned / MODEL_CARD, card | {"fingerprint": "of other counts"})
    with pytest.raises(ConfigError, match="fingerprint differs"):
        command.refit(dataset="toy", sequences=prepared, **given)
    changed(finetuned, finetuned)
    with pytest.raises(ConfigError, match="weights_sha256 differs"):
        command.refit(dataset="toy", sequences=prepared, **given)
