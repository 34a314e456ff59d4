"""params.yaml: every mistake is named by its key, and the last of shared, dataset's and model's setting wins."""

from __future__ import annotations

import pytest
import yaml
from support import ROOT, with_values

from seqrec.commands.settings import check
from seqrec.config import ConfigError, FinetuneConfig, from_dict, load, parse, read_changes

PARAMS = {
    "dataset": "small",
    "leaderboard": ["narrow"],
    "prepare": {"min_user_events": 5},
    "finetune": {"epochs": 10, "batch_size": 64, "learning_rate": 0.001},
    "datasets": {
        name: {"finetune": {"epochs": 20, "batch_size": 32}, "options": {"length": 20, "d_model": 32}}
        for name in ("small", "large")
    },
    "models": {
        "narrow": {"architecture": "sasrec", "options": {"d_model": 8}, "finetune": {"epochs": 30}},
        "wide": {"architecture": "sasrec", "finetune": {}},
    },
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("finetuning", {}, "finetuning: unknown key"),
        ("finetune.epoch", 3, "finetune.epoch: unknown key; did you mean epochs?"),
        ("datasets.large.finetune.epoch", 3, "datasets.large.finetune.epoch: unknown key"),
        ("models.wide.option", {}, "models.wide.option: unknown key"),
        ("finetune", 3, "finetune: expected a mapping of settings, got 3"),
        ("datasets", None, "datasets: expected a mapping of settings, got None"),
        ("seed", -1, "seed must be at least 0"),
        ("leaderboard", "narrow", "leaderboard: expected a list of names, got 'narrow'"),
        ("datasets.large.finetune.epochs", "x", "datasets.large.finetune.epochs: Input should be a valid integer"),
        ("filter_seen", "perhaps", "filter_seen: Input should be a valid boolean"),
        ("evaluate.filter_seen", True, "evaluate.filter_seen: unknown key; it is a key of the top level"),
        ("finetune.clip_norm", float("nan"), "finetune: clip_norm must be a finite number, not nan"),
        ("prepare.protocol", "random", "prepare.protocol: Input should be 'LOO-full', 'LOO-101', 'RATIO-full'"),
        ("finetune.precision", "fp8", "finetune.precision: Input should be 'fp32' or 'bf16', or auto (got 'fp8')"),
        ("pretrain.item_vectors", "x", "pretrain.item_vectors: Input should be 'random' or 'counts', or auto"),
        ("pretrain.precision", "fp8", "pretrain.precision: Input should be 'fp32' or 'bf16' (got 'fp8')"),
        ("dataset", "huge", "dataset: no entry datasets.huge; known are small, large"),
        ("sources", ["huge"], "sources: no entry datasets.huge; known are small, large"),
        ("sources", ["large", "large"], "sources: list each name once, not large, large"),
        ("leaderboard", ["../narrow"], "leaderboard: expected a name of letters, digits, dots and dashes"),
        (
            "kubernetes",
            {"resources": {"default": {"tolerations": [{"key": "a", "seconds": "9"}]}}},
            "kubernetes: resources.default: tolerations: unknown key seconds; known are key, operator, value, effect",
        ),
        (
            "kubernetes",
            {"resources": {"default": {"tolerations": [{"key": "a", "effect": "Noschedule"}]}}},
            "kubernetes: resources.default: tolerations: effect must be one of NoSchedule",
        ),
        ("kubernetes", {"resources": {"fit": {}}}, "kubernetes: resources.fit: unknown step; known are default"),
        *(
            ("kubernetes", {"resources": {"default": {name: value}}}, f"kubernetes: resources.default: {name} must be")
            for name, value in (
                ("cpu", ""),
                ("cpu", "z"),
                ("cpu", "0.0"),
                ("memory", "1.5Gi"),
                ("memory", "9K"),
                ("shared_memory", "x"),
            )
        ),
        *(
            ("kubernetes", setting, message)
            for setting, message in (
                ({"labels": {"a b": ""}}, "kubernetes: labels: 'a b' is not the key of a label"),
                ({"labels": {"A_/b": ""}}, "kubernetes: labels: 'A_/b' is not the key of a label"),
                ({"labels": {"a/b/c": ""}}, "kubernetes: labels: 'a/b/c' is not the key of a label"),
                ({"labels": {"a": "x" * 64}}, "kubernetes: labels.a: 'xxx"),
                ({"labels": {"a": "b."}}, "kubernetes: labels.a: 'b.' is not the value of a label"),
                (
                    {"resources": {"finetune": {"node_selector": {"pool": "g p u"}}}},
                    "kubernetes: resources.finetune: node_selector.pool: 'g p u' is not the value",
                ),
                (
                    {"resources": {"finetune": {"gpu_type": "a gpu"}}},
                    "kubernetes: resources.finetune: gpu_type: 'a gpu' is not the key of a resource",
                ),
                (
                    {"resources": {"finetune": {"tolerations": [{"key": "a b", "operator": "Exists"}]}}},
                    "kubernetes: resources.finetune: tolerations: 'a b' is not the key of a taint",
                ),
                ({"environment": {"A=B": "1"}}, "kubernetes: ['A=B'] cannot be the name of an environment variable"),
                ({"environment": {"": "1"}}, "kubernetes: [''] cannot be the name of an environment variable"),
                ({"secrets": {"s": {"key": "1A"}}}, "kubernetes: ['1A'] cannot be the name of an environment"),
                ({"secrets": {"My_secret": {}}}, "kubernetes: ['My_secret'] cannot be the name of a resource"),
                ({"state_claim": "a.claim"}, "kubernetes: ['a.claim'] cannot be the name of a claim's volume"),
            )
        ),
        ("kubernetes", {"launch": {"prepare": {"processes": 3}}}, "kubernetes: launch.prepare.processes: prepare runs"),
        (
            "kubernetes",
            {"state_claim": "state", "launch": {"prepare": {"launcher": "job"}}},
            "kubernetes.launch.prepare.launcher: the value job needs prepare.engine: spark",
        ),
        ("sources", ["small"], "sources: small is the dataset itself"),
        ("finetune.epochs", True, "finetune: epochs must be of type int, not True"),
        (
            "tune",
            {"spaces": {"narrow": {"finetune.counts": {"choices": ["none"]}}}},
            "tune.spaces.narrow.finetune.counts",
        ),
        ("leaderboard", ["narrow", "deep"], "leaderboard: no entry models.deep; known are narrow, wide"),
    ],
)
def test_a_mistake_is_named_by_its_key(path, value, message):
    with pytest.raises(ConfigError) as error:
        from_dict(with_values(PARAMS, {path: value}))
    assert str(error.value).startswith(message)


def test_a_models_setting_wins_over_the_datasets_and_that_over_the_shared_one():
    params = from_dict(PARAMS)
    assert params.section("prepare").min_user_events == 5
    assert params.section("finetune").batch_size == 32
    assert params.section("finetune").epochs == 20
    assert params.section("finetune", model="wide").epochs == 20
    narrow = params.section("finetune", model="narrow")
    assert (narrow.epochs, narrow.batch_size, narrow.learning_rate) == (30, 32, 0.001)
    assert params.model("narrow").options == {"length": 20, "d_model": 8}
    assert params.model("wide").options == {"length": 20, "d_model": 32}


def test_what_is_left_out_has_a_default():
    params = from_dict({"dataset": "ml-1m", "models": {"sasrec": {}, "wide": {"architecture": "sasrec"}}})
    assert params.leaderboard == ("sasrec", "wide")
    assert params.section("ingest").source == "ml-1m"
    assert params.model("sasrec") == params.model("wide")
    assert params.section("finetune", model="wide") == FinetuneConfig()


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"epochs": 20.0}, "epochs", 20),  # KFP carries every number as a double
        (yaml.safe_load("learning_rate: 1e-3"), "learning_rate", 0.001),  # text, to YAML
    ],
)
def test_numbers_are_cast_to_the_fields_type(values, field, expected):
    value = getattr(parse(FinetuneConfig, values, "finetune"), field)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    "path", [ROOT / "params.yaml", *sorted((ROOT / "configs").rglob("*.yaml"))], ids=lambda path: path.stem
)
def test_every_config_passes_the_checks_of_a_run(path):
    params = load(path)

    assert params.leaderboard
    check(params, ingests=True)


LAYERS = {
    "dataset": "ml-1m",
    "finetune": {"epochs": 5, "counts": {"alpha": 1.0}},
    "datasets": {"ml-1m": {"finetune": {"epochs": 7}, "filter_seen": False}, "ml-100k": {}},
    "models": {"sasrec": {"finetune": {"epochs": 9, "seed": 1, "counts": {"alpha": 2.0}}}, "gru4rec": {}},
}


@pytest.mark.parametrize(
    ("path", "value", "stage", "expected"),
    [
        ("finetune.epochs", 3, "epochs", {"sasrec": 3, "gru4rec": 3}),
        ("models.sasrec.finetune.epochs", 3, "epochs", {"sasrec": 3, "gru4rec": 7}),
        ("datasets.ml-1m.finetune.epochs", 3, "epochs", {"sasrec": 9, "gru4rec": 3}),
        ("seed", 5, "seed", {"sasrec": 5, "gru4rec": 5}),
        ("finetune.counts.alpha", 0.5, "counts", {"sasrec": {"alpha": 0.5}, "gru4rec": {"alpha": 0.5}}),
        ("finetune.counts", "none", "counts", {"sasrec": "none", "gru4rec": "none"}),
    ],
)
def test_a_change_for_one_run_is_the_strongest_layer(path, value, stage, expected):
    before = from_dict(LAYERS)
    after = before.with_overrides({path: value})

    assert {model: getattr(after.section("finetune", model=model), stage) for model in after.models} == expected
    assert before == from_dict(LAYERS)


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_said_of_one_model_is_kept_in_whatever_order(turned):
    changes = {"models.sasrec.finetune.epochs": 2, "finetune.epochs": 3, "finetune.seed": 5, "seed": 7}
    changes = dict(sorted(changes.items(), reverse=turned))
    after = from_dict(LAYERS).with_overrides(changes)

    assert [after.section("finetune", model=name).epochs for name in ("sasrec", "gru4rec")] == [2, 3]
    assert (after.section("finetune", model="gru4rec").seed, after.section("pretrain").seed) == (5, 7)


def test_a_change_of_one_model_leaves_those_of_the_same_anchor_alone():
    params = load(ROOT / "params.yaml")
    assert params.models["fpmc"]["finetune"] is params.models["mfbpr"]["finetune"]

    after = params.with_overrides({"models.fpmc.finetune.learning_rate": 0.1})

    assert after.section("finetune", model="fpmc").learning_rate == 0.1
    assert after.models["mfbpr"] == params.models["mfbpr"]


def test_whether_seen_items_are_removed_is_said_by_the_run_then_by_the_dataset_then_by_the_top_level():
    params = from_dict(LAYERS)

    assert params.filters_seen() is False
    assert params.with_overrides({"filter_seen": True}).filters_seen() is True
    assert params.with_overrides({"dataset": "ml-100k"}).filters_seen() is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("finetune.epoch=3", r"finetune\.epoch: unknown key; did you mean epochs\?"),
        ("finetun.epochs=3", r"finetun\.epochs: unknown key; did you mean finetune\?"),
        ("models.sasrek.options.layers=3", r"models\.sasrek"),
        ("finetune.refit=valid", "set evaluate.refit"),
        ("finetune.epochs", "expected KEY=VALUE"),
        ("finetune=3", "finetune: name a setting inside it"),
        ("finetune.epochs=[", "not valid YAML"),
        ("ingest.items=it's.csv", r"^ingest\.items=it's\.csv: No closing quotation"),
        ("ingest.items=a\\", "No escaped character; quote a value with a quotation mark or a backslash"),
    ],
)
def test_a_wrong_change_is_refused_with_the_closest_key(text, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(LAYERS).with_overrides(read_changes(text))


def test_changes_are_read_as_yaml():
    assert read_changes("a.b=1e-3 c=[x,y] d=true 'e=two words' f=1.5 g=2000-01-01 h=%d/%m/%Y") == {
        "a.b": 1e-3,
        "c": ["x", "y"],
        "d": True,
        "e": "two words",
        "f": 1.5,
        "g": "2000-01-01",
        "h": "%d/%m/%Y",
    }
