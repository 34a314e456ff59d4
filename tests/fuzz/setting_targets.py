"""The form of a Kubeflow run. (Configs: tests/config/test_mutations.py.)"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from support import paths

from fuzz.harness import Target
from seqrec.cluster.form import overridden, settings_of_model, settings_of_run, without_cluster
from seqrec.config import ConfigError, load
from seqrec.pipelines.training import PIPELINES

ROOT = Path(__file__).parents[2]
NASTY = [
    *(None, "", "x", "ml-1m", "1e-3", "\x00", "z" * 10_000, True, False),
    *(0, -1, 0.5, 10**30, -(10**30), float("nan"), float("inf"), 1e-320),
    *([], {}, [None], {"": None}, {None: 1}, {1: 2}, [[[]]], {"a": {"b": {}}}),
]


COMPILED = json.loads(json.dumps(without_cluster(load(ROOT / "params.yaml"))), parse_int=float)  # as KFP hands it on
FORM = {"dataset": "ml-100k", "models": ["sasrec"], "protocol": "", "epochs": 0.0, "seed": 42.0, "overrides": {}}
PATHS = [".".join(path) for path in paths(COMPILED)]


@st.composite
def forms(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a kind of pipeline and its form, with up to three inputs changed or overrides added."""
    form = copy.deepcopy(FORM)
    value = st.sampled_from([value for value in NASTY if _is_json(value)]) | st.sampled_from([[1], {}, [[["x"]]], 3.5])
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([*FORM, *["overrides"] * 6]))
        if key == "overrides" and isinstance(form["overrides"], dict) and draw(st.integers(0, 9)):
            path = draw(st.sampled_from([*PATHS, "", ".", "finetune.", ".epochs", "models.sasrec.options.layers.deep"]))
            form["overrides"][path] = copy.deepcopy(draw(value))
        else:
            form[key] = copy.deepcopy(draw(value))
    return draw(st.sampled_from(PIPELINES)), form


def _is_json(value: Any) -> bool:
    return not isinstance(value, dict) or all(isinstance(key, str) for key in value)


def _fill_in(value: tuple[str, dict[str, Any]]) -> None:
    pipeline, form = value
    overridden("register", COMPILED["register"], form["overrides"])
    settings_of_run(COMPILED, pipeline, "", "run-1", form)
    settings_of_model(COMPILED, "sasrec", form)


SETTINGS = [Target("kubeflow-form", forms(), _fill_in, allowed=(ConfigError,))]
