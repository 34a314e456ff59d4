"""The table of stages, dvc.yaml and the documentation describe the same pipeline; what fails says what to add.

tests/components and tests/pipelines do the same for Kubeflow.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import yaml
from support import ROOT

from seqrec.config import from_dict
from seqrec.pipeline import STAGES, Stage

DVC_ALONE = {"settings"}  # under DVC, the stages of the table depend on the files that it writes
PARAMS = from_dict(
    {"dataset": "toy", "sources": ["other"], "datasets": {"toy": {}, "other": {}}, "models": {"sasrec": {}}}
)
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def dvc_stages() -> dict[str, dict]:
    """Return what dvc.yaml should hold of each stage of the table, under its name there."""
    found = {}
    for stage in STAGES:
        if stage.each == "dataset":
            found[stage.name] = dvc_stage(stage, "toy", "${dataset}", "", None)
            matrix = {"source": "${sources}"}
            found[f"{stage.name}_source"] = dvc_stage(stage, "other", "${item.source}", " --dataset ", matrix)
        elif stage.each == "model":
            found[stage.name] = dvc_stage(stage, "sasrec", "${item.model}", " --model ", {"model": "${leaderboard}"})
        else:
            found[stage.name] = dvc_stage(stage, "", "", "", None)
    return found


def dvc_stage(stage: Stage, item: str, named: str, flag: str, matrix: dict[str, str] | None) -> dict:
    """Return the stage for `item`, which dvc.yaml calls `named`."""
    names = {key: text.replace(item, named) for key, text in stage.names(PARAMS, item).items()}
    settings = stage.settings_file(PARAMS, item).replace(item, named)
    metrics = [stage.metrics] if stage.metrics else []
    reads, writes = (*stage.reads, *stage.project.values()), (*stage.writes, *metrics)
    return ({"matrix": matrix} if matrix else {}) | {
        "cmd": f"python -m seqrec {stage.name}{flag}{named if flag else ''}",
        "params": [{f"settings/{settings}.json": None}],
        "deps": [*(path.format(**names) for path in reads), f"settings/{settings}.code.json"],
        "outs": [path.format(**names) for path in writes],
    }


@pytest.mark.parametrize(("name", "expected"), dvc_stages().items(), ids=dvc_stages())
def test_dvc_has_the_stages_of_the_table(name, expected):
    found = dict(DVC.get(name, {}))
    for key in ("deps", "outs"):  # in any order; an output may have options
        found[key] = sorted(next(iter(path)) if isinstance(path, Mapping) else path for path in found.get(key, []))

    block = yaml.safe_dump({name: expected}, sort_keys=False)
    assert found == expected | {key: sorted(expected[key]) for key in ("deps", "outs")}, f"dvc.yaml lacks\n\n{block}"


@pytest.mark.parametrize("name", ["settings", "register"])
def test_dvc_never_takes_a_stage_from_its_run_cache_if_it_reads_or_writes_elsewhere(name):
    options = [one for out in DVC[name]["outs"] if isinstance(out, Mapping) for one in out.values()]
    assert any(one.get("persist") for one in options)  # DVC leaves such a stage out of its run cache


def test_dvc_has_one_stage_more_than_the_table():
    assert set(DVC) - set(dvc_stages()) == DVC_ALONE


def test_the_documentation_lists_the_stages_of_the_table():
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [f"| {stage.name} | {stage.summary} |" for stage in STAGES if f"\n| {stage.name} | " not in page]

    assert not missing, "docs/architecture.md, Stages, lacks " + "\n".join(missing)
