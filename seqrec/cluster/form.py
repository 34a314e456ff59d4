"""The form of a Kubeflow run: its inputs become the settings of every step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqrec.config import SECTIONS, ConfigError, Params, Section, from_dict, parse
from seqrec.config.checks import suggestion
from seqrec.config.ranges import Count, Seed
from seqrec.pipeline import STAGES

INPUTS = {  # of every pipeline; what the form says beside each of them
    "dataset": "Dataset to train on: a key of `datasets` in params.yaml, such as ml-1m.",
    "models": 'Models to train and compare: keys of `models` in params.yaml, such as ["sasrec", "flash4rec"].',
    "protocol": "How the data is split: LOO-full, LOO-101, RATIO-full or temporal. Leave it empty to use params.yaml.",
    "epochs": "Maximum number of epochs of fine-tuning. Enter 0 to use params.yaml.",
    "seed": "Random seed of the trainings. It does not change the split of the data.",
    "overrides": (
        'Other settings, by their path in params.yaml: {"finetune.learning_rate": 0.002, '
        '"models.sasrec.options.layers": 3}. They take precedence over the entries of the dataset and of the models.'
    ),
}
APART = ("kubernetes", "serve", "tune")  # sections that no step of a run reads
FIXED = (*APART, "dataset", "sources", "leaderboard", "seed")  # have inputs, or are fixed
ORIGIN = ("source", "category", "interactions", "repository", "events")  # settings of `ingest` that say what is read
SHARED = [name for name in SECTIONS if name not in APART]


@dataclass(frozen=True, kw_only=True)
class Form(Section):
    """The inputs of a run, as a person or KFP has filled them in; `INPUTS` says what they mean."""

    dataset: str
    models: list[str]
    protocol: str
    epochs: Count
    seed: Seed
    overrides: dict[str, Any]


def filled_in(params: Mapping[str, Any], form: Mapping[str, Any]) -> Params:
    """Return `params`, in the form of params.yaml, with the inputs of the form applied.

    Raises:
        ConfigError: an input is wrong, or the shared settings would read one dataset under the name of another.
    """
    read, given = from_dict(params), parse(Form, form, "")
    if not given.models or len(set(given.models)) < len(given.models):
        raise ConfigError(f"models: name at least one model, and each only once; got {given.models!r:.80}")
    _check_origin(read.as_dict(), given.dataset)
    for path in given.overrides:
        if path.partition(".")[0] in FIXED:
            raise ConfigError(
                f"overrides.{path}: not allowed here, because it has its own input or is fixed by `compile`"
            )
    inputs: dict[str, Any] = {"dataset": given.dataset, "leaderboard": given.models}
    inputs |= {"seed": given.seed} if given.seed != read.seed else {}  # otherwise models keep seeds of their own
    common = {"prepare.protocol": given.protocol, "finetune.epochs": given.epochs}
    return read.with_overrides(inputs | {path: value for path, value in common.items() if value} | given.overrides)


def _check_origin(content: Mapping[str, Any], dataset: str) -> None:
    """Raise ConfigError if `dataset` would be read from the source of the dataset that was compiled."""
    if dataset == content["dataset"]:
        return
    if dataset not in content["datasets"]:
        raise ConfigError(f"dataset: no entry datasets.{dataset}{suggestion(dataset, list(content['datasets']))}")
    own = content["datasets"][dataset]["ingest"]
    for key in ORIGIN:
        if content["ingest"].get(key) and key not in own:
            raise ConfigError(
                f"dataset: {dataset} does not set ingest.{key} and would be read from the data of "
                f"{content['dataset']}; set datasets.{dataset}.ingest.{key}"
            )


def overridden(section: str, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` of a section with its `overrides`, for a step that reads no other section.

    Raises:
        ConfigError: the input `overrides` is not a mapping.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides: expected a mapping of settings, got {overrides!r:.80}")
    prefix = f"{section}."
    return {**values, **{key.removeprefix(prefix): overrides[key] for key in overrides if key.startswith(prefix)}}


def settings_of_run(
    params: Mapping[str, Any], pipeline: str, source: str, run: str, form: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the outputs of the step `settings`, for the dataset or, if it is named, for a source to pre-train on.

    They are the sections in `SHARED`, `filter_seen`, the key `dataset`, and `fresh`: a text that differs in each run
    where the data may have changed, so that KFP's cache does not answer.

    Raises:
        ConfigError: a setting is wrong.
    """
    from seqrec.commands.settings import check
    from seqrec.data import sources

    read = filled_in(params, form)
    check(read)
    if pipeline == "pretraining":
        check_pretraining(read)
    dataset = source or read.dataset
    of_dataset = [stage.name for stage in STAGES if stage.each == "dataset"]
    sections = {name: read.section(name, dataset=dataset if name in of_dataset else None) for name in SHARED}
    pinned = pipeline != "retraining" and sources.is_pinned(sections["ingest"])
    values = {name: dataclasses.asdict(section) for name, section in sections.items()}
    return values | {
        "filter_seen": read.filters_seen(),
        "dataset": dataset,
        "fresh": "" if pinned else run,
    }


def settings_of_model(params: Mapping[str, Any], model: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections, architecture, refit and filter_seen for the steps of `model`."""
    read = filled_in(params, form)
    sections = {name: read.section(name, model=model) for name in SHARED} | {"architecture": read.model(model)}
    values = {name: dataclasses.asdict(section) for name, section in sections.items()}
    return values | {"refit": values["evaluate"]["refit"], "filter_seen": read.filters_seen()}


def write_parameters(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Write `values` as output parameters of a step, each to its file in `places`: texts as they are, or JSON."""
    for name, place in places.items():
        text = values[name] if isinstance(values[name], str) else json.dumps(values[name])
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text(text, encoding="utf-8")


def without_cluster(params: Params) -> dict[str, Any]:
    """Return the settings that a run may change, in the form of params.yaml."""
    return {key: value for key, value in params.as_dict().items() if key not in APART}


def check_pretraining(params: Params) -> None:
    """Raise ConfigError unless all models of `leaderboard` learn from text, and there is something to learn from."""
    if not params.sources:
        raise ConfigError("sources: name the datasets to pre-train on")
    if params.section("evaluate").refit != "none":
        raise ConfigError("evaluate.refit: pipeline `pretraining` trains nothing to refit; set it to none")
    from seqrec.models import REGISTRY, SequenceModel  # need torch, which the other pipelines do not need to compile
    from seqrec.models.optional import ReadsTokens

    for model in params.leaderboard:
        kind = REGISTRY.get(params.model(model).architecture, SequenceModel)
        reads_items = params.model(model).options.get("encoder") == "items"
        if not issubclass(kind, ReadsTokens) or reads_items:
            raise ConfigError(
                f"models.{model}: pipeline `pretraining` needs text models (architecture "
                "recformer, encoder text); choose one with --models"
            )
