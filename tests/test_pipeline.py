"""The table of stages, dvc.yaml and the Kubeflow pipelines describe the same pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from seqrec.config import from_dict
from seqrec.pipeline import STAGES, Stage

ROOT = Path(__file__).parent.parent
DVC_ALONE = {"settings"}  # under DVC, the stages of the table depend on the files that it writes
PARAMS = from_dict(
    {"dataset": "toy", "sources": ["other"], "datasets": {"toy": {}, "other": {}}, "models": {"sasrec": {}}}
)


def dvc_stages() -> dict[str, dict]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def runs() -> list[tuple[str, Stage, str, str]]:
    """Return (stage in dvc.yaml, stage, what it runs for, how dvc.yaml names that)."""
    found = []
    for stage in STAGES:
        if stage.each == "dataset":
            found += [
                (stage.name, stage, "toy", "${dataset}"),
                (f"{stage.name}_source", stage, "other", "${item.source}"),
            ]
        else:
            found.append((stage.name, stage, "sasrec", "${item.model}"))
    return found


def paths(stage: Stage, item: str, named: str, templates) -> set[str]:
    names = stage.names(PARAMS, item)
    return {path.format(**{name: text.replace(item, named) for name, text in names.items()}) for path in templates}


def test_dvc_has_the_stages_of_the_table_and_one_of_its_own():
    assert set(dvc_stages()) == {name for name, *_ in runs()} | DVC_ALONE


@pytest.mark.parametrize(("name", "stage", "item", "named"), runs(), ids=[name for name, *_ in runs()])
def test_a_stage_of_dvc_reads_and_writes_what_the_table_says(name, stage, item, named):
    found = dvc_stages()[name]
    settings = f"settings/{stage.settings_file(PARAMS, item)}".replace(item, named)
    metrics = [stage.metrics] if stage.metrics else []

    assert found["params"] == [{f"{settings}.json": None}]
    assert set(found["deps"]) == paths(stage, item, named, stage.reads) | {
        f"{settings}.code.json",
        *stage.project.values(),
    }
    assert {next(iter(out)) if isinstance(out, Mapping) else out for out in found["outs"]} == paths(
        stage, item, named, [*stage.writes, *metrics]
    )
    matrix = {"model": {"model": "${leaderboard}"}, "dataset": {"source": "${sources}"}, "run": None}[stage.each]
    assert found.get("matrix") == (None if name == stage.name and stage.each == "dataset" else matrix)


@pytest.mark.parametrize(("name", "stage", "item", "named"), runs(), ids=[name for name, *_ in runs()])
def test_a_command_of_dvc_runs_its_stage(name, stage, item, named):
    flags = {"${item.source}": ["--dataset", named], "${dataset}": []}.get(named, ["--model", named])
    flags = [] if stage.each == "run" else flags
    assert dvc_stages()[name]["cmd"].split() == ["python", "-m", "seqrec", stage.name, *flags]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_function_gets_all_of_its_arguments(stage):
    function = getattr(import_module(f"seqrec.stages.{stage.name}"), stage.name)
    parameters = inspect.signature(function).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    item = {"run": "", "dataset": "toy", "model": "sasrec"}[stage.each]
    given = {*stage.paths, *stage.project, *stage.settings(PARAMS, item)}

    assert required <= given <= set(parameters)


def test_every_file_that_a_stage_reads_is_written_before():
    written: set[str] = set()
    for stage in STAGES:
        own = {path.replace("{source}", "") for path in stage.reads}
        assert own - written - {path.rpartition("/")[0] for path in written} == set(), stage.name
        written |= {path.replace("{source}", "") for path in (*stage.writes, stage.metrics)}
