"""The stages of the pipeline, declared once: their paths, what they read and write, and their settings.

`run` and the commands follow this table. tests/test_pipeline.py compares dvc.yaml with it, and test_pipelines.py
Kubeflow, so that a stage, an artifact or a setting that is missing in one of them fails there.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the list of commands follows the table, and is printed at once
    from seqrec.config import Params

Each = Literal["run", "dataset", "model"]
Settings = Callable[["Params", str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage. Its function is seqrec.stages.NAME.NAME.

    Paths are relative to the folder of a run; under DVC that is the project. {item} stands for the dataset or the model
    that the stage runs for. {source} stands for `sources/NAME/` if the dataset is one of `sources`, else for nothing;
    {figures} for its name, or `.dataset`: one for every dataset of the run, so that DVC knows an earlier run again.
    """

    name: str
    summary: str  # what `seqrec --help` says of its command
    each: Each  # how often it runs: once, for every dataset, or for every model of the leaderboard
    paths: Mapping[str, str]  # arguments of the function that are paths of the run
    settings: Settings  # arguments of the function that come from params.yaml, for a dataset or a model
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    project: Mapping[str, str] = field(default_factory=dict)  # arguments that are files of the project
    metrics: str = ""  # file of the figures that the function returns

    def __call__(
        self, params: Params, folder: Path, item: str = "", *, metrics: Path | None = None, **more: Any
    ) -> dict[str, float]:
        """Run the stage in `folder` for `item`, a dataset or a model; return its figures.

        Args:
            params: the settings.
            folder: folder of the run.
            item: key of the dataset or model that the stage runs for.
            metrics: file for the figures; default: the stage's own.
            more: further arguments of the function; they replace the stage's own.
        """
        from seqrec.artifacts import write_json

        names = self.names(params, item)
        paths = {name: folder / path.format(**names) for name, path in self.paths.items()}
        files = {name: Path(path) for name, path in self.project.items()}
        figures: dict[str, float] = self.function(**{**self.settings(params, item), **paths, **files, **more})
        if metrics is None and self.metrics:
            metrics = folder / self.metrics.format(**names)
        if metrics is not None:
            write_json(metrics, dict(figures))
        return figures

    @property
    def function(self) -> Callable[..., dict[str, float]]:
        """The function; its module is imported here, because some take seconds."""
        return pkgutil.resolve_name(f"seqrec.stages.{self.name}:{self.name}")

    def taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of `given` is an argument of the function."""
        return {name: given[name] for name in inspect.signature(self.function).parameters if name in given}

    @property
    def places(self) -> dict[str, str]:
        """All arguments of the function that are paths."""
        return {**self.paths, **self.project}

    def items(self, params: Params) -> tuple[str, ...]:
        """Return the datasets or models that the stage runs for."""
        runs = {"run": ("",), "dataset": (params.dataset, *params.sources), "model": params.leaderboard}
        return runs[self.each]

    def names(self, params: Params, item: str) -> dict[str, str]:
        """Return what the names in braces stand for."""
        source = item in params.sources
        return {"source": f"sources/{item}/" if source else "", "figures": item if source else ".dataset", "item": item}

    def settings_file(self, params: Params, item: str) -> str:
        """Return the name of the file below settings/ that holds the settings of the stage, without its ending."""
        if self.each == "model":
            return f"{item}/{self.name}"
        return f"{self.names(params, item)['source']}{self.name}"


def _of_dataset(stage: str) -> Settings:
    return lambda params, dataset: {"dataset": dataset, "config": params.section(stage, dataset=dataset)}


def _of_training(stage: str, params: Params, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "config": params.section(stage, model=model),
        "experiment": params.section("register").experiment,
        "filter_seen": params.filters_seen(),
    }


def _of_evaluation(params: Params) -> dict[str, Any]:
    return {"filter_seen": params.filters_seen(), "config": params.section("evaluate")}


SEQUENCES = "data/sequences/sequences.arrow"
VOCABULARY = "data/sequences/vocabulary.parquet"
USERS = "data/sequences/users.parquet"
NEGATIVES = "data/sequences/negatives.arrow"
SPLIT = "data/sequences/split.json"
BASELINES = ("popularity", "repeats", "markov", "ease", "pctm", "seqrules")
TABLES = ("data/{source}interactions.parquet", "data/{source}items.parquet", "data/{source}source.json")

STAGES = (
    Stage(
        name="ingest",
        summary="fetch a dataset and read it into the canonical tables",
        each="dataset",
        paths={"output": "data/{source}", "downloads": "state/downloads"},
        settings=_of_dataset("ingest"),
        reads=(),
        writes=("data/{source}raw", "data/{source}quarantine.parquet", *TABLES),
    ),
    Stage(
        name="validate",
        summary="check the tables; stop the run if a critical rule fails",
        each="dataset",
        paths={"data": "data/{source}", "report": "reports/{source}validation.json"},
        project={"reference": "configs/reference.json"},
        settings=_of_dataset("validate"),
        reads=TABLES,
        writes=("reports/{source}validation.json", "reports/{source}validation.html"),
    ),
    Stage(
        name="prepare",
        summary="filter, number, order and split the interactions",
        each="dataset",
        paths={
            "data": "data/{source}",
            "validation": "reports/{source}validation.json",
            "sequences": "data/{source}sequences",
        },
        settings=_of_dataset("prepare"),
        reads=(*TABLES[:2], "reports/{source}validation.json"),
        metrics="data/sources/{figures}.json",  # so that data/sources exists without sources too
        writes=tuple(
            path.replace("data/", "data/{source}") for path in (SEQUENCES, VOCABULARY, USERS, NEGATIVES, SPLIT)
        ),
    ),
    Stage(
        name="baselines",
        summary="compute and evaluate the baselines: popularity, repeats, markov, ease, pctm and seqrules",
        each="run",
        paths={"sequences": "data/sequences", "data": "data", "artifacts": "artifacts", "reports": "reports"},
        settings=lambda params, _: _of_evaluation(params),
        reads=(SEQUENCES, VOCABULARY, USERS, NEGATIVES, SPLIT, "data/items.parquet"),
        writes=tuple(path for name in BASELINES for path in (f"reports/{name}", f"artifacts/{name}/finetuned")),
    ),
    Stage(
        name="pretrain",
        summary="build a model; pre-train it if it has such a phase",
        each="model",
        paths={
            "data": "data",
            "sequences": "data/sequences",
            "initial": "artifacts/{item}/initial",
            "state": "state",
        },
        settings=lambda params, model: {
            "architecture": params.model(model),
            "sources": params.sources,
            **_of_training("pretrain", params, model),
        },
        reads=(SEQUENCES, VOCABULARY, USERS, SPLIT, "data/items.parquet", "data/sources"),
        writes=("artifacts/{item}/initial",),
    ),
    Stage(
        name="finetune",
        summary="train a model to predict the next item; resumes by itself",
        each="model",
        paths={
            "sequences": "data/sequences",
            "initial": "artifacts/{item}/initial",
            "checkpoint": "artifacts/{item}/finetuned",
            "state": "state",
        },
        settings=lambda params, model: {
            **_of_training("finetune", params, model),
            "refit": params.section("evaluate").refit,
        },
        reads=(SEQUENCES, VOCABULARY, USERS, SPLIT, "artifacts/{item}/initial"),
        writes=("artifacts/{item}/finetuned",),
        metrics="reports/{item}/finetune.json",
    ),
    Stage(
        name="evaluate",
        summary="rank the whole catalogue for every validation and test case",
        each="model",
        paths={
            "sequences": "data/sequences",
            "checkpoint": "artifacts/{item}/finetuned",
            "report": "reports/{item}",
        },
        settings=lambda params, model: {"model": model, **_of_evaluation(params)},
        reads=(SEQUENCES, VOCABULARY, USERS, NEGATIVES, SPLIT, "artifacts/{item}/finetuned"),
        writes=tuple(
            f"reports/{{item}}/{name}" for name in ("cases.parquet", "recommendations.parquet", "metrics.json")
        ),
        metrics="reports/evaluated/{item}.json",
    ),
    Stage(
        name="register",
        summary="write the leaderboard, log to MLflow, choose the champion",
        each="run",
        paths={"artifacts": "artifacts", "reports": "reports", "sequences": "data/sequences", "data": "data"},
        settings=lambda params, _: {
            "leaderboard": params.leaderboard,
            "params": params.as_dict(),
            "config": params.section("register"),
        },
        reads=(
            "reports/evaluated",
            *(path for name in BASELINES for path in (f"reports/{name}", f"artifacts/{name}/finetuned")),
            *(SEQUENCES, SPLIT, USERS, VOCABULARY, "data/source.json", "reports/validation.json"),
        ),
        writes=tuple(
            f"reports/{name}" for name in ("leaderboard.json", "leaderboard.csv", "curves.csv", "index.html", "summary")
        ),
        metrics="reports/register.json",
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}
