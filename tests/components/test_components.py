from __future__ import annotations

import ast
import inspect

import pytest
from support import ROOT

from seqrec.config import sections
from seqrec.pipeline import STAGES

MODULES = [ast.parse((ROOT / f"components/{name}.py").read_text()) for name in ("stage_steps", "other_steps")]
STEPS = {node.name: node for module in MODULES for node in module.body if isinstance(node, ast.FunctionDef)}


OTHERS = {"champion", "collect", "join", "record", "settings", "model_settings"}


def test_every_stage_has_a_step_and_no_other_step_has():
    assert set(STEPS) == {stage.name for stage in STAGES} | OTHERS


def test_every_step_can_be_given_resources():
    assert {"default", *STEPS} - {"model_settings"} == set(sections.STEPS)  # which has those of `settings`


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_step_gives_its_stage_what_it_asks_for(stage):
    found = [node for node in ast.walk(STEPS[stage.name]) if isinstance(node, ast.Call)]
    (call,) = [node for node in found if isinstance(node.func, ast.Name) and node.func.id in ("run", "run_model")]
    parameters = inspect.signature(stage.function).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}

    given = {keyword.arg for keyword in call.keywords}
    assert call.args[0].value == stage.name
    assert required <= given
    assert given - set(parameters) <= {"state"}
