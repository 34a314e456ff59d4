"""The pipelines on Kubeflow: the DAG of dvc.yaml, its form being filled in when a run is started.

- training: from raw logs to a registered champion;
- retraining: the same, but each model starts from the champion where it can, and ingest always runs;
- pretraining: a text model learns from `sources` alone; how far that carries is measured on `dataset`, unseen.

A step reads the settings that the steps `settings` and `model_settings` make of params.yaml, as compiled, and the form.
Each gets its own section alone, so that KFP caches it by what it reads. `sources`, and what a step asks of the cluster,
are fixed here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import PipelineTask
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.graph_component import GraphComponent

from seqrec.cluster.form import INPUTS, check_pretraining, filled_in, without_cluster
from seqrec.components import other_steps
from seqrec.components import stage_steps as steps
from seqrec.config import KubernetesConfig, Params
from seqrec.pipelines.resources import STATE, apply

PIPELINES = ("training", "retraining", "pretraining")
Outputs = Mapping[str, Any]


def build(
    kind: str, params: Params, models: Sequence[str], state: str = STATE, *, cache: bool = True
) -> GraphComponent:
    """Return pipeline `kind`, whose form is filled in with `params` and `models`, keys of `params.models`.

    Args:
        kind: one of `PIPELINES`.
        params: the settings.
        models: the form's default.
        state: folder of downloads and resume states.
        cache: whether KFP may skip a step that it has run before.

    Raises:
        ConfigError: an unknown model, a repeated one, none, or one that this kind of pipeline cannot use.
    """
    defaults = inputs(params, models)
    read = filled_in(params.as_dict(), defaults)
    if kind == "pretraining":
        check_pretraining(read)

    def pipeline(*values: Any) -> None:
        dag = _Dag(kind, params, state, dict(zip(defaults, values, strict=True)), cache=cache)
        with dsl.ExitHandler(dag.record(), name="run"):
            dag.pretraining() if kind == "pretraining" else dag.training()

    described = "\n".join(f"    {name}: {text}" for name, text in INPUTS.items())
    pipeline.__doc__ = f"{kind.capitalize()} on {params.dataset}: {', '.join(models)}.\n\nArgs:\n{described}\n"
    pipeline.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # where KFP looks for its parameters
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value, annotation=type(value))
            for name, value in defaults.items()
        ]
    )
    return dsl.pipeline(name=f"seqrec-{kind}")(pipeline)


def inputs(params: Params, models: Sequence[str]) -> dict[str, Any]:
    """Return what the form of a run holds before anybody changes it."""
    return {
        "dataset": params.dataset,
        "models": list(models),
        "protocol": "",
        "epochs": 0,
        "seed": params.seed,
        "overrides": {},
    }


class _Dag:
    """The tasks of one pipeline while it is being compiled."""

    def __init__(self, kind: str, params: Params, state: str, form: Mapping[str, Any], *, cache: bool) -> None:
        self.kind, self.params, self.state, self.form, self.cache = kind, params, state, form, cache
        self.cluster: KubernetesConfig = params.section("kubernetes")
        self.compiled = json.loads(json.dumps(without_cluster(params)))

    def record(self) -> PipelineTask:
        config = dataclasses.asdict(self.params.section("register"))
        run, overrides = dsl.PIPELINE_JOB_ID_PLACEHOLDER, self.form["overrides"]
        return self._task(other_steps.record, pipeline=self.kind, pipeline_run=run, config=config, overrides=overrides)

    def training(self) -> None:
        given = self._settings()
        data, validation, sequences = self._prepared(given)
        joined = self._joined(data)
        seen = given["filter_seen"]
        baselines = self._task(
            steps.baselines, config=given["evaluate"], filter_seen=seen, data=data, sequences=sequences
        )
        champion = self._champion(given) if self.kind == "retraining" else {}
        with self._each_model() as model:
            own = self._own(model)
            tuned = self._task(
                steps.finetune,
                model=model,
                filter_seen=own["filter_seen"],
                refit=own["refit"],
                config=own["finetune"],
                sequences=sequences,
                initial=self._pretrained(model, own, data=joined, sequences=sequences, **champion),
            ).outputs["checkpoint"]
            report = self._evaluated(model, own, tuned, sequences)
        registered = self._task(
            steps.register,
            dataset=given["key"],
            pipeline_run=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            leaderboard=self.form["models"],
            filter_seen=seen,
            **{name: given[name] for name in ("ingest", "validate", "prepare", "evaluate")},
            config=given["register"],
            validation=validation,
            results=baselines.outputs["results"],
            checkpoints=dsl.Collected(tuned),
            evaluations=dsl.Collected(report),
            sequences=sequences,
            data=data,
        )
        registered.set_caching_options(enable_caching=False)  # what it does lies outside of its outputs

    def pretraining(self) -> None:
        data, _, sequences = self._prepared(self._settings())
        joined = self._joined(data)
        with self._each_model() as model:
            own = self._own(model)
            initial = self._pretrained(model, own, data=joined, sequences=sequences)
            self._evaluated(model, own, initial, sequences, alone=True)

    def _settings(self, source: str = "") -> Outputs:
        """Return the settings of the run, those of the data being for `source` where it is named."""
        task = self._task(
            steps.settings,
            source,
            params=self.compiled,
            pipeline=self.kind,
            pipeline_run=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            source=source,
            **self.form,
        )
        return task.set_caching_options(enable_caching=False).outputs

    def _each_model(self) -> dsl.ParallelFor:
        return dsl.ParallelFor(items=self.form["models"], name="models", parallelism=self.cluster.parallelism)

    def _own(self, model: Any) -> Outputs:
        """Return all settings that the steps of a model read: the local runner hands no output into a loop."""
        return self._task(steps.model_settings, params=self.compiled, model=model, **self.form).outputs

    def _prepared(self, given: Outputs, subject: str = "") -> tuple[Any, Any, Any]:
        """Return tables, their validation, and sequences; a failed validation leaves all after it undone."""
        key = given["key"]
        fetched = self._task(
            steps.ingest,
            subject,
            dataset=key,
            fresh=given["fresh"],
            config=given["ingest"],
            **self._collected(given, subject),
        )
        data = fetched.outputs["data"]
        checked = self._task(
            steps.validate, subject, dataset=key, reference=given["reference"], config=given["validate"], data=data
        )
        validation = checked.outputs["validation"]
        prepared = self._task(
            steps.prepare, subject, dataset=key, config=given["prepare"], data=data, validation=validation
        )
        return data, validation, prepared.outputs["sequences"]

    def _collected(self, given: Outputs, subject: str) -> dict[str, Any]:
        """Return the log of the store's events for `ingest`, if `ingest.events` was set at compilation."""
        if not self.params.section("ingest", dataset=subject or self.params.dataset).events:
            return {}
        task = self._task(other_steps.collect, subject, dataset=given["key"])
        return {"events": task.set_caching_options(enable_caching=False).outputs["events"]}

    def _joined(self, data: Any) -> Any:
        """Return `data` with the prepared `sources` added, for models that pre-train on them."""
        for name in self.params.sources:
            own, _, sequences = self._prepared(self._settings(name), name)
            joined = self._task(other_steps.join, name, source=name, others=data, data=own, sequences=sequences)
            data = joined.outputs["joined"]
        return data

    def _champion(self, given: Outputs) -> dict[str, Any]:
        """Return the weights of the champion, an input of `pretrain`."""
        task = self._task(other_steps.champion, dataset=given["key"], config=given["register"])
        task.set_caching_options(enable_caching=False)  # it is another one after each promotion
        return {"champion": task.outputs["weights"]}

    def _pretrained(self, model: Any, own: Outputs, **data: Any) -> Any:
        return self._task(
            steps.pretrain,
            model=model,
            sources=list(self.params.sources),
            filter_seen=own["filter_seen"],
            architecture=own["architecture"],
            config=own["pretrain"],
            **data,
        ).outputs["initial"]

    def _evaluated(self, model: Any, own: Outputs, checkpoint: Any, sequences: Any, *, alone: bool = False) -> Any:
        shared = {"filter_seen": own["filter_seen"], "config": own["evaluate"], "sequences": sequences, "alone": alone}
        return self._task(steps.evaluate, model=model, checkpoint=checkpoint, **shared).outputs["report"]

    def _task(self, component: BaseComponent, subject: str = "", **inputs: Any) -> PipelineTask:
        """Return the task of `component` with its resources; `subject` is the source that it is for."""
        step = component.name.removeprefix("model-")  # both steps that look up settings ask for the same
        if "state" in component.component_spec.inputs:
            inputs["state"] = self.state
        task = apply(component(**inputs), step, self.cluster).set_caching_options(enable_caching=self.cache)
        return task.set_display_name(f"{step} {subject}") if subject else task
