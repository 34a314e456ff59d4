from __future__ import annotations

import json

import pytest
import yaml
from support import ROOT

from seqrec.cluster.form import filled_in, overridden, settings_of_model, settings_of_run, without_cluster
from seqrec.config import ConfigError, IngestConfig, from_dict, load
from seqrec.data.sources import is_pinned

PARAMS = ROOT / "params.yaml"
FORM = {"dataset": "ml-100k", "models": ["sasrec"], "protocol": "", "epochs": 0, "seed": 42, "overrides": {}}


@pytest.fixture(scope="module")
def params():
    """What is compiled into a pipeline, as KFP hands it to a step: numbers are floats."""
    return json.loads(json.dumps(without_cluster(load(PARAMS))), parse_int=float)


def resolved(params, pipeline="training", source="", **form):
    return settings_of_run(params, pipeline, source, "run-1", FORM | form)


def test_an_untouched_form_gives_the_settings_of_the_file_and_another_dataset_its_own(params):
    values, read = resolved(params), load(PARAMS)

    assert values["dataset"] == "ml-100k"
    assert values["prepare"]["protocol"] == read.section("prepare").protocol
    own = settings_of_model(params, "sasrec", FORM)
    assert own["finetune"]["epochs"] == read.section("finetune", model="sasrec").epochs
    assert own["architecture"]["options"]["length"] == 50
    assert values["filter_seen"] is own["filter_seen"] is True
    assert own["evaluate"] == values["evaluate"]

    values = resolved(params, dataset="ml-1m")
    assert (values["dataset"], values["ingest"]["source"]) == ("ml-1m", "ml-1m")
    assert settings_of_model(params, "sasrec", FORM | {"dataset": "ml-1m"})["architecture"]["options"]["length"] == 200


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"dataset": "nothing"}, "dataset: no entry datasets.nothing"),
        ({"models": ["nothing"]}, "no entry models.nothing"),
        ({"models": []}, "models: name at least one model, and each only once"),
        ({"models": ["sasrec", "sasrec"]}, "models: name at least one model, and each only once"),
        ({"protocol": "sideways"}, "prepare: protocol must be one of|prepare.protocol"),
        ({"overrides": {"finetune.epohcs": 3}}, r"finetune\.epohcs: unknown key"),
        ({"overrides": {"finetune": {"epochs": 3}}}, "finetune: name a setting inside it"),
        ({"overrides": {"kubernetes.user": 1}}, "overrides.kubernetes.user: not allowed here"),
        ({"overrides": {"models.sasrec.options.layers.deep": 1, "models.sasrec.options.layers": 2}}, "options"),
        ({"overrides": None}, "overrides: Input should be a valid dictionary"),
        ({"epochs": 3.0, "overrides": {"models.sasrec": None}}, r"models\.sasrec: expected a mapping"),
        (
            {"overrides": {"datasets.ml-1m.finetune": [3], "finetune.epochs": 3.0}},
            r"ml-1m\.finetune: expected a mapping",
        ),
        ({"overrides": {"datasets.ml-100k.ingest.source": "ml-1m"}}, "ml-100k is the name of another source"),
    ],
    ids=str,
)
def test_what_the_form_cannot_mean_is_refused(params, form, message):
    with pytest.raises(ConfigError, match=message):
        resolved(params, **form)


@pytest.mark.parametrize("key", ["source", "category", "interactions", "events"])
def test_a_dataset_is_never_read_from_what_another_one_is_read_from(key):
    content = {
        "dataset": "mine",
        "ingest": {"source": "csv", "interactions": "mine.csv", "events": True},
        "datasets": {"mine": {}, "yours": {"ingest": {"source": "csv", "interactions": "yours.csv", "events": False}}},
        "models": {"sasrec": {}},
    }
    if key == "category":
        content["ingest"] = {"source": "amazon-2018", "category": "Gift_Cards"}
        content["datasets"]["yours"]["ingest"] = {"source": "amazon-2018", "category": "Books"}
    kept = without_cluster(from_dict(content))
    own = kept["datasets"]["yours"]["ingest"]
    assert {name: resolved(kept, dataset="yours")["ingest"][name] for name in own} == own

    del kept["datasets"]["yours"]["ingest"][key]
    with pytest.raises(ConfigError, match=f"yours does not set ingest.{key} and would be read from the data of mine"):
        resolved(kept, dataset="yours")


def test_inputs_win_over_what_datasets_and_models_say(params):
    content = {**params, "models": {"sasrec": {"finetune": {"epochs": 9.0}}}, "leaderboard": ["sasrec"]}
    content["datasets"] = {**params["datasets"], "ml-100k": {"finetune": {"epochs": 30.0, "patience": 5.0}}}

    read = filled_in(content, FORM | {"epochs": 3, "seed": 7, "overrides": {"models.sasrec.options.layers": 3.0}})

    config = read.section("finetune", model="sasrec")
    assert (config.epochs, config.patience, config.seed) == (3, 5, 7)
    assert read.model("sasrec").options["layers"] == 3
    assert content["models"]["sasrec"] == {"finetune": {"epochs": 9.0}}


def test_the_cache_answers_only_where_the_source_cannot_have_changed(params):
    assert resolved(params)["fresh"] == ""
    assert resolved(params, pipeline="retraining")["fresh"] == "run-1"
    assert resolved(params, dataset="yelp")["fresh"] == "run-1"  # no digests
    own, commit = {"source": "csv", "interactions": "log.csv"}, "https://example.org/project"
    assert is_pinned(IngestConfig(**own, repository=commit, revision="0" * 40))
    assert not is_pinned(IngestConfig(**own, repository=commit, revision="main"))


def test_a_source_of_pretraining_has_its_own_data_settings():
    content = yaml.safe_load(PARAMS.read_text(encoding="utf-8")) | {"sources": ["health"]}
    kept = without_cluster(from_dict(content))

    values = resolved(kept, "pretraining", "health", models=["recformer_text"])

    assert values["dataset"] == "health"
    assert values["ingest"] != resolved(kept, "pretraining", models=["recformer_text"])["ingest"]
    with pytest.raises(ConfigError, match="text models"):
        resolved(kept, "pretraining", "health", models=["sasrec"])


def test_overrides_of_a_section_are_found_by_themselves():
    values = overridden("register", {"tracking_uri": "a", "min_gain": 0.0}, {"register.tracking_uri": "b", "seed": 1})

    assert values == {"tracking_uri": "b", "min_gain": 0.0}
    with pytest.raises(ConfigError, match="overrides: expected a mapping"):
        overridden("register", {}, None)
