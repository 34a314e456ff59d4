"""The pipelines on Kubeflow: the DAG of dvc.yaml, its models chosen when it is compiled.

- training: from raw logs to a registered champion;
- retraining: the same, but each model starts from the champion where it can, and ingest always runs;
- pretraining: a text model learns from `sources` alone; how far that carries is measured on `dataset`, unseen.

Every section of params.yaml is a parameter of the pipeline, one a model for the settings of models, so that KFP caches
a step by the settings it reads; a submission may replace any of them. What a step asks of the cluster is fixed here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import PipelineTask
from kfp.dsl.graph_component import GraphComponent

from components.baselines import baselines
from components.champion import champion
from components.collect import collect
from components.evaluate import evaluate
from components.finetune import finetune
from components.ingest import ingest
from components.join import join
from components.prepare import prepare
from components.pretrain import pretrain
from components.record import record
from components.register import register
from components.validate import validate
from components.warm_start import warm_start
from pipelines.resources import STATE, apply, place
from seqrec.config import ConfigError, IngestConfig, KubernetesConfig, Params

PIPELINES = ("training", "retraining", "pretraining")
PREPARATION = ("ingest", "validate", "prepare")
BASELINE = "configs/baseline.json"  # a file of the image
Outputs = Mapping[str, Any]


def build(kind: str, params: Params, models: Sequence[str]) -> GraphComponent:
    """Return pipeline `kind` for `models` (keys of `params.models`), its parameters defaulting to `params`.

    Raises:
        ConfigError: an unknown model, a repeated one, none, a key that cannot be part of a parameter's name, or one
            that this kind of pipeline cannot use.
    """
    defaults = parameters(params, models)
    if kind == "pretraining":
        _check_pretraining(params, models)

    def pipeline(*values: Any) -> None:
        dag = _Dag(kind, params, models, dict(zip(defaults, values, strict=True)))
        with dsl.ExitHandler(dag.record(), name="run"):
            dag.pretraining() if kind == "pretraining" else dag.training()

    pipeline.__doc__ = f"{kind.capitalize()} on {params.dataset}: {', '.join(models)}."
    pipeline.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # where KFP looks for its parameters
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value, annotation=type(value))
            for name, value in defaults.items()
        ]
    )
    return dsl.pipeline(name=f"seqrec-{kind}")(pipeline)


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


def _check_pretraining(params: Params, models: Sequence[str]) -> None:
    if not params.sources:
        raise ConfigError("sources: name the datasets to pre-train on")
    from models import REGISTRY  # takes torch, which compiling the other pipelines does without

    for model in models:
        kind = REGISTRY.get(params.model(model).architecture)
        reads_items = params.model(model).options.get("encoder") == "items"
        if kind is None or kind.text != "tokens" or reads_items:
            raise ConfigError(
                f"models.{model}: pretraining is for text models (architecture recformer, encoder text); --models ..."
            )


class _Dag:
    """The tasks of one pipeline while it is being compiled."""

    def __init__(self, kind: str, params: Params, models: Sequence[str], given: Mapping[str, Any]) -> None:
        self.kind, self.params, self.models, self.given = kind, params, models, given
        self.cluster: KubernetesConfig = params.section("kubernetes")

    def record(self) -> PipelineTask:
        run = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        return self._task("record", record, pipeline=self.kind, pipeline_run=run, config=self.given["register"])

    def training(self) -> None:
        given = self.given
        data, sequences = self._prepared(given["dataset"], given, self.params.dataset)
        joined = self._joined(data)
        shared = {"filter_seen": given["filter_seen"], "sequences": sequences}
        results = self._task("baselines", baselines, config=given["evaluate"], **shared).outputs["results"]
        start = self._start()
        for model in self.models:
            initial = start(model, data=joined, **shared)
            tuned = self._task(
                "finetune",
                finetune,
                model,
                model=model,
                state=given["state"],
                place=place("finetune", self.cluster),
                config=given[f"finetune_{model}"],
                initial=initial,
                **shared,
            )
            results = self._ranked(model, tuned.outputs["checkpoint"], results, shared)
        registered = self._task(
            "register",
            register,
            dataset=given["dataset"],
            pipeline_run=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            leaderboard=list(self.models),
            filter_seen=given["filter_seen"],
            **{name: given[name] for name in ("ingest", "validate", "prepare", "evaluate")},
            config=given["register"],
            results=results,
            sequences=sequences,
            data=data,
        )
        registered.set_caching_options(enable_caching=False)  # what it does lies outside of its outputs

    def pretraining(self) -> None:
        given = self.given
        data, sequences = self._prepared(given["dataset"], given, self.params.dataset)
        joined = self._joined(data)
        shared = {"filter_seen": given["filter_seen"], "sequences": sequences}
        for model in self.models:
            initial = self._pretrained(pretrain, model, data=joined, **shared)
            config = given["evaluate"]
            self._task("evaluate", evaluate, model, model=model, config=config, checkpoint=initial, **shared)

    def _prepared(self, dataset: Any, config: Mapping[str, Any], key: str) -> tuple[Any, Any]:
        """Return ingested tables and sequences; a failed validation leaves the latter, and all after it, undone."""
        state = self.given["state"]
        fetched = self._task("ingest", ingest, key, dataset=dataset, state=state, config=config["ingest"])
        fetched.set_caching_options(self.kind != "retraining" and is_pinned(self.params.section("ingest", dataset=key)))
        data = fetched.outputs["data"]
        checked = self._task(
            "validate",
            validate,
            key,
            dataset=dataset,
            baseline=self.given["baseline"],
            config=config["validate"],
            data=data,
        )
        prepared = self._task(
            "prepare",
            prepare,
            key,
            dataset=dataset,
            state=state,
            place=place("prepare", self.cluster),
            config=config["prepare"],
            data=data,
            validation=checked.outputs["validation"],
        )
        return data, prepared.outputs["sequences"]

    def _joined(self, data: Any) -> Any:
        """Return `data` with the prepared `sources` added, for models that pre-train on them."""
        for name in self.params.sources:
            config = {stage: dataclasses.asdict(self.params.section(stage, dataset=name)) for stage in PREPARATION}
            own, sequences = self._prepared(name, config, name)
            joined = self._task("join", join, name, source=name, others=data, data=own, sequences=sequences)
            data = joined.outputs["joined"]
        return data

    def _start(self) -> Callable[..., Any]:
        """Return what makes the weights that a model's fine-tuning starts from."""
        if self.kind != "retraining":
            return lambda model, **inputs: self._pretrained(pretrain, model, **inputs)
        task = self._task("champion", champion, dataset=self.given["dataset"], config=self.given["register"])
        task.set_caching_options(enable_caching=False)  # it is another one after each promotion
        weights = task.outputs["weights"]
        return lambda model, **inputs: self._pretrained(warm_start, model, champion=weights, **inputs)

    def _pretrained(self, component: Callable[..., PipelineTask], model: str, **inputs: Any) -> Any:
        task = self._task(
            "pretrain",
            component,
            model,
            model=model,
            state=self.given["state"],
            place=place("pretrain", self.cluster),
            sources=list(self.params.sources),
            architecture=self.given[f"architecture_{model}"],
            config=self.given[f"pretrain_{model}"],
            **inputs,
        )
        return task.outputs["initial"]

    def _ranked(self, model: str, checkpoint: Any, results: Any, shared: Mapping[str, Any]) -> Any:
        """Return `results` with checkpoint and report of `model` added."""
        config = self.given["evaluate"]
        report = self._task("evaluate", evaluate, model, model=model, config=config, checkpoint=checkpoint, **shared)
        added = {"others": results, "checkpoint": checkpoint, "report": report.outputs["report"]}
        return self._task("collect", collect, model, model=model, **added).outputs["results"]

    def _task(
        self, step: str, component: Callable[..., PipelineTask], subject: str = "", **inputs: Any
    ) -> PipelineTask:
        """Return the task of `component` with the resources of `step`; `subject` is the model or dataset it is for."""
        task = apply(component(**inputs), step, self.cluster)
        return task.set_display_name(f"{step} {subject}") if subject else task


def is_pinned(config: IngestConfig) -> bool:
    """Say whether the source can only ever give one content, so that ingesting it twice is a waste."""
    from seqrec.data import sources

    if config.repository:
        return re.fullmatch(r"[0-9a-f]{40}", config.revision) is not None
    publications = sources.find(config).publications(config)
    return all(
        (one.archive is not None and bool(one.archive.sha256))
        or all(file.sha256 for file in one.files if file.required)
        for one in publications
    )
