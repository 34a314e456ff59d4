"""Dependencies point one way: who may import what."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import ROOT

from seqrec.code_closure import closure
from seqrec.models import REGISTRY

FOLDERS = ("models", "components", "pipelines")  # of the repository's top level; seqrec links to each
PACKAGES = ("seqrec", *(f"seqrec/{name}" for name in FOLDERS))
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))  # rglob follows no links
STDLIB = sys.stdlib_module_names

# what trains and evaluates on a machine without the orchestration packages
STAGES = ("pretrain", "finetune", "evaluate", "baselines")
STARTS = ("seqrec.commands.run", *(f"seqrec.stages.{name}" for name in STAGES))
STARTS += tuple(REGISTRY.module(name) for name in REGISTRY)  # imported when a model is built
CORE = sorted({ROOT / path for module in STARTS for path in closure(module, lazy=False)})
CORE_MAY_IMPORT = {"seqrec", "seqrec.models", "accelerate", "numpy", "pyarrow", "rich", "safetensors", "torch", "yaml"}
CORE_MAY_IMPORT |= {"filelock"}  # which torch needs
CORE_LACKS = (
    *("dvc", "great_expectations", "kfp", "matplotlib", "mlflow", "narwhals", "optuna", "pandas", "plotly"),
    *("polars", "pydantic", "requests", "scipy", "transformers"),
)

OWNERS = {  # package -> the only files that may import it, even inside a function
    "kfp": ("seqrec/components/", "seqrec/pipelines/"),
    "kubernetes": ("seqrec/cluster/jobs.py",),
    "dvc": ("seqrec/data/dvc_revisions.py", "seqrec/commands/repro.py"),
    "mlflow": (
        "seqrec/tracking/runs.py",
        "seqrec/tracking/gate.py",
        "seqrec/tracking/registry.py",
        "seqrec/serving/pyfunc_model.py",
        "seqrec/tracking/view.py",
        "seqrec/commands/registry.py",
        "seqrec/commands/ui.py",
        "seqrec/stages/register.py",
    ),
    "great_expectations": ("seqrec/data/expectations.py",),
    "optuna": ("seqrec/commands/tune.py",),
    "plotly": ("seqrec/analysis/plots.py", "seqrec/analysis/report.py"),
    "pydantic": ("seqrec/config/checks.py", "seqrec/serving/schemas.py"),
    "fastapi": ("seqrec/serving/",),
    "sqlalchemy": ("seqrec/serving/events.py", "seqrec/tracking/runs.py"),
    "transformers": ("seqrec/training/pretrained.py",),
    "seqrec.components": ("seqrec/components/", "seqrec/pipelines/"),
    "seqrec.pipelines": ("seqrec/pipelines/",),
}


def package(name: str) -> str:
    """Return the package of a dotted name: its first part, and the second if it names one of our folders."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "seqrec" and rest and rest[0] in FOLDERS else first


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the packages that import statements among `nodes` name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {package(name) for name in names}


@functools.cache
def anywhere(path: Path) -> set[str]:
    """Return the packages that a file imports, wherever in it."""
    return imported(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def at_module_level(path: Path) -> set[str]:
    """Return the packages that importing a file imports; unless it lies in a condition."""
    return imported(ast.parse(path.read_text(encoding="utf-8")).body)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def below(folder: str) -> list[Path]:
    return [path for path in FILES if relative(path).startswith(folder)]


@pytest.mark.parametrize(
    ("files", "imports", "allowed"),
    [
        (below("seqrec/models/"), anywhere, {"torch", "seqrec.models"}),
        (below("seqrec/components/"), at_module_level, {"kfp", "seqrec.components"}),  # stage code when a step runs
        (CORE, at_module_level, CORE_MAY_IMPORT),
    ],
    ids=["models", "steps", "training core"],
)
def test_these_files_import_little(files, imports, allowed):
    others = {relative(path): imports(path) - STDLIB - allowed for path in files}

    assert {name: packages for name, packages in others.items() if packages} == {}


@pytest.mark.parametrize("owned", OWNERS)
def test_a_package_is_imported_by_its_owners_only(owned):
    users = {relative(path) for path in FILES if owned in anywhere(path)}

    assert {user for user in users if not user.startswith(OWNERS[owned])} == set()


def test_the_folders_are_imported_through_seqrec_only():
    assert {relative(path) for path in FILES if anywhere(path) & set(FOLDERS)} == set()


WITHOUT_OTHERS = """
import importlib, sys
sys.modules.update(dict.fromkeys({lacks!r}))  # None there makes an import fail
for name in {modules!r}:
    importlib.import_module(name)
from pathlib import Path
from seqrec import config
from seqrec.config import checks
from seqrec.models import REGISTRY
config.load(Path("params.yaml"))
assert not checks.CASTS
for values in {values!r}:
    try:
        print(config.parse(config.FinetuneConfig, values, "finetune").epochs)
    except config.ConfigError as error:
        print(error)
print(config.parse(REGISTRY["flash4rec"].Options, {{"attributes": []}}, "options").attributes)
"""


def test_the_training_core_needs_no_other_package_and_checks_keys_and_ranges_without_pydantic():
    modules = [relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in CORE]
    expected = [
        ({"epoch": 7}, "finetune.epoch: unknown key"),
        ({"epochs": "many"}, "finetune: epochs must be of type int, not 'many'"),
        ({"loss": "cee"}, "finetune: loss must be one of ce, sampled_ce"),
        ({"patience": 0}, "finetune: patience must be at least 1, not 0"),
        ({"epochs": 7}, "7"),
    ]
    values = [given for given, _ in expected]
    code = WITHOUT_OTHERS.format(lacks=CORE_LACKS, modules=modules, values=values)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)

    assert done.returncode == 0, done.stderr
    *lines, listed = done.stdout.splitlines()
    for line, (_, start) in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert listed == "()"  # the list of a model's card
