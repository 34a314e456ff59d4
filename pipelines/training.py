"""The training pipeline on Kubeflow: the DAG of dvc.yaml, its models chosen when it is compiled.

Every section of params.yaml is a parameter of the pipeline, one a model for the settings of models, so that KFP caches
a step by the settings it reads; a submission may replace any of them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from components.baselines import baselines
from components.collect import collect
from components.evaluate import evaluate
from components.finetune import finetune
from components.ingest import ingest
from components.join import join
from components.prepare import prepare
from components.pretrain import pretrain
from components.register import register
from components.validate import validate
from seqrec.config import ConfigError, Params

STATE = "/tmp/seqrec/state"  # downloads and resume states: lost with the pod, until a volume is mounted there
PREPARATION = ("ingest", "validate", "prepare")
BASELINE = "configs/baseline.json"  # a file of the image


def training_pipeline(params: Params, models: Sequence[str]) -> GraphComponent:
    """Return the pipeline for `models` (keys of `params.models`), its parameters defaulting to `params`.

    Raises:
        ConfigError: an unknown model, a repeated one, none, or a key that cannot be part of a parameter's name.
    """
    defaults = parameters(params, models)
    sources = {
        name: {stage: dataclasses.asdict(params.section(stage, dataset=name)) for stage in PREPARATION}
        for name in params.sources
    }

    def training(*values: Any) -> None:
        _steps(dict(zip(defaults, values, strict=True)), models, sources)

    training.__doc__ = f"From raw logs of {params.dataset} to a registered champion: {', '.join(models)}."
    training.__signature__ = inspect.Signature(  # where KFP looks for its parameters
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value, annotation=type(value))
            for name, value in defaults.items()
        ]
    )
    return dsl.pipeline(name="seqrec-training")(training)


def parameters(params: Params, models: Sequence[str]) -> dict[str, Any]:
    """Return the pipeline's parameters and their defaults: sections as they hold for the dataset and each model."""
    if not models or len(set(models)) < len(models):
        raise ConfigError(f"leaderboard: name each model once, and at least one; got {list(models)}")
    sections = {
        name: dataclasses.asdict(params.section(name))
        for name in ("ingest", "validate", "prepare", "evaluate", "register")
    }
    # Training reads this setting too, but must not be repeated when another one of `evaluate` changes.
    filter_seen = sections["evaluate"].pop("filter_seen")
    fixed = {"dataset": params.dataset, "state": STATE, "baseline": BASELINE, "filter_seen": filter_seen}
    own = {}
    for model in models:
        if not model.isidentifier():
            raise ConfigError(f"models.{model}: on Kubeflow a key may hold letters, digits and underscores only")
        own[f"architecture_{model}"] = dataclasses.asdict(params.model(model))
        for stage in ("pretrain", "finetune"):
            own[f"{stage}_{model}"] = dataclasses.asdict(params.section(stage, model=model))
    return {**fixed, **sections, **own}


def _steps(given: dict[str, Any], models: Sequence[str], sources: dict[str, dict[str, Any]]) -> None:
    dataset, filter_seen, state = given["dataset"], given["filter_seen"], given["state"]
    data = ingest(dataset=dataset, state=state, config=given["ingest"]).outputs["data"]
    validation = validate(dataset=dataset, baseline=given["baseline"], config=given["validate"], data=data).outputs[
        "validation"
    ]
    prepared = prepare(dataset=dataset, config=given["prepare"], data=data, validation=validation)
    sequences = prepared.outputs["sequences"]
    shared = {"filter_seen": filter_seen, "sequences": sequences}
    joined = data
    for name, sections in sources.items():
        joined = _join(name, sections, joined, given)
    results = baselines(config=given["evaluate"], **shared).outputs["results"]
    for model in models:
        start = pretrain(
            model=model,
            state=state,
            data=joined,
            sources=list(sources),
            architecture=given[f"architecture_{model}"],
            config=given[f"pretrain_{model}"],
            **shared,
        ).set_display_name(f"pretrain {model}")
        tuned = finetune(
            model=model, state=state, config=given[f"finetune_{model}"], initial=start.outputs["initial"], **shared
        ).set_display_name(f"finetune {model}")
        checkpoint = tuned.outputs["checkpoint"]
        ranked = evaluate(model=model, config=given["evaluate"], checkpoint=checkpoint, **shared)
        ranked.set_display_name(f"evaluate {model}")
        collected = collect(model=model, others=results, checkpoint=checkpoint, report=ranked.outputs["report"])
        results = collected.set_display_name(f"collect {model}").outputs["results"]
    registered = register(
        dataset=dataset,
        leaderboard=list(models),
        filter_seen=filter_seen,
        **{name: given[name] for name in ("ingest", "validate", "prepare", "evaluate")},
        config=given["register"],
        results=results,
        sequences=sequences,
        data=data,
    )
    registered.set_caching_options(enable_caching=False)  # what it does lies outside of its outputs


def _join(name: str, config: dict[str, Any], others: Any, given: dict[str, Any]) -> Any:
    """Return `others` with the prepared dataset `name` added, for models that pre-train on it."""
    data = ingest(dataset=name, state=given["state"], config=config["ingest"]).outputs["data"]
    validation = validate(dataset=name, baseline=given["baseline"], config=config["validate"], data=data).outputs[
        "validation"
    ]
    made = prepare(dataset=name, config=config["prepare"], data=data, validation=validation).outputs["sequences"]
    step = join(source=name, others=others, data=data, sequences=made).set_display_name(f"join {name}")
    return step.outputs["joined"]
