"""Which files decide what a module computes: found by its imports, never listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqrec.code_closure import closure, deciding
from seqrec.config import FinetuneConfig
from seqrec.training import checkpoint

FILES = {
    "seqrec/__init__.py": "VERSION = 1",
    "seqrec/stages/__init__.py": '"""The stages."""',
    "seqrec/stages/train.py": "import numpy\nfrom seqrec import losses\nfrom seqrec.models import REGISTRY",
    "seqrec/losses.py": "def loss():\n    from seqrec.data.draws import draw\n    return draw()",
    "seqrec/data/__init__.py": "SEED = 3",
    "seqrec/data/draws.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import seqrec.unread",
    "seqrec/unread.py": "import seqrec.config",
    "seqrec/config/__init__.py": "from seqrec.config.sections import Section",
    "seqrec/config/sections.py": "class Section: pass",
    "seqrec/models/__init__.py": "from seqrec.models.wide import Wide\nREGISTRY = [Wide]",
    "seqrec/models/wide.py": "import torch",
}


@pytest.fixture
def root(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(paths) -> list[str]:
    return [path.as_posix() for path in paths]


MODELS = ["seqrec/models/__init__.py", "seqrec/models/wide.py"]
DATA = ["seqrec/data/__init__.py", "seqrec/data/draws.py"]


def test_a_closure_follows_imports_in_functions_too_but_none_for_type_checking(root):
    found = closure("seqrec.stages.train", root=root)
    assert names(found) == sorted([*MODELS, "seqrec/__init__.py", *DATA, "seqrec/losses.py", "seqrec/stages/train.py"])


def test_imports_in_functions_can_be_left_out(root):
    found = names(closure("seqrec.stages.train", lazy=False, root=root))
    assert found == sorted([*MODELS, "seqrec/__init__.py", "seqrec/losses.py", "seqrec/stages/train.py"])


def test_exempt_packages_are_left_out_with_what_only_they_import(root):
    (root / "seqrec/losses.py").write_text("import seqrec.config.sections")
    found = closure("seqrec.stages.train", exempt=("seqrec", "seqrec.config"), root=root)
    assert names(found) == sorted([*MODELS, "seqrec/losses.py", "seqrec/stages/train.py"])


def test_an_added_import_is_followed(root):
    before = names(deciding("seqrec.stages.train", root))
    (root / "seqrec/losses.py").write_text(FILES["seqrec/losses.py"] + "\n\nimport seqrec.unread")
    assert names(deciding("seqrec.stages.train", root)) == sorted([*before, "seqrec/unread.py"])


def test_a_misspelt_module_is_an_error(root):
    with pytest.raises(ValueError, match=r"seqrec\.stages\.fit is not a module"):
        closure("seqrec.stages.fit", root=root)


@pytest.mark.parametrize(
    ("stage", "decides", "does_not"),
    [
        ("pretrain", ["seqrec/stages/pretrain.py", "seqrec/training/prefetch.py"], ["seqrec/stages/finetune.py"]),
        ("finetune", ["seqrec/training/objectives.py", "seqrec/models/layers.py"], ["seqrec/tracking/runs.py"]),
        ("ingest", ["seqrec/data/dvc_revisions.py", "seqrec/data/download.py"], ["seqrec/artifacts.py"]),
        ("validate", ["seqrec/data/drift.py"], ["seqrec/config/sections.py"]),
        ("register", ["seqrec/tracking/registry.py", "seqrec/analysis/report.py"], ["seqrec/__main__.py"]),
    ],
)
def test_what_decides_a_stage(stage, decides, does_not):
    found = names(deciding(f"seqrec.stages.{stage}"))
    assert set(decides) <= set(found)
    assert not set(does_not) & set(found)


def test_an_edit_of_what_picks_the_training_rows_changes_the_fingerprint(root, monkeypatch):
    (root / "seqrec/stages/pretrain.py").write_text("def train_parts(): return 1")
    monkeypatch.setattr(checkpoint, "ROOT", root)
    before = checkpoint.fingerprint("seqrec.stages.pretrain", FinetuneConfig())
    assert checkpoint.fingerprint("seqrec.stages.pretrain", FinetuneConfig()) == before
    (root / "seqrec/stages/pretrain.py").write_text("def train_parts(): return 2")
    assert checkpoint.fingerprint("seqrec.stages.pretrain", FinetuneConfig()) != before
