"""Which files decide what a module computes: found by its imports, never listed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from seqrec.code_closure import closure, deciding
from seqrec.config import FinetuneConfig
from seqrec.models import REGISTRY, name_of
from seqrec.training import resume

FILES = {
    "seqrec/__init__.py": "VERSION = 1",
    "seqrec/stages/__init__.py": '"""The stages."""',
    "seqrec/artifacts.py": "import seqrec.config\n\nWEIGHTS = 'best'",
    "seqrec/stages/train.py": "import numpy\nfrom seqrec import artifacts, losses\nfrom seqrec.models import base",
    "seqrec/losses.py": "def loss():\n    from seqrec.data.draws import draw\n    from seqrec.models import other",
    "seqrec/data/__init__.py": "SEED = 3",
    "seqrec/data/draws.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import seqrec.unread",
    "seqrec/unread.py": "import seqrec.config",
    "seqrec/config/__init__.py": "from seqrec.config.sections import Section",
    "seqrec/config/sections.py": "import seqrec.bounds",
    "seqrec/bounds.py": "LOW = 0",
    "seqrec/models/__init__.py": "from seqrec.models.base import Model",
    "seqrec/models/base.py": "class Model: pass",
    "seqrec/models/block.py": "import torch",
    "seqrec/models/wide.py": "from seqrec.models import base, block",
    "seqrec/models/other.py": "from seqrec.models.base import Model",
}


@pytest.fixture
def root(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(paths) -> list[str]:
    return [path.as_posix() for path in paths]


STAGE = ["seqrec/artifacts.py", "seqrec/losses.py", "seqrec/stages/train.py"]
BASE = ["seqrec/models/base.py"]
DATA = ["seqrec/data/__init__.py", "seqrec/data/draws.py"]
CONFIG = ["seqrec/bounds.py", "seqrec/config/__init__.py", "seqrec/config/sections.py"]
PACKAGES = ["seqrec/__init__.py", "seqrec/models/__init__.py"]


def test_a_closure_follows_imports_in_functions_too_but_none_for_type_checking(root):
    found = closure("seqrec.stages.train", root=root)
    assert names(found) == sorted([*STAGE, *BASE, *DATA, *CONFIG, *PACKAGES, "seqrec/models/other.py"])


def test_of_all_models_only_the_own_one_and_its_imports_decide_and_no_settings(root):
    assert names(deciding("seqrec.stages.train", root=root)) == sorted([*STAGE, *BASE, *DATA])
    own = ["seqrec/models/block.py", "seqrec/models/wide.py"]
    assert names(deciding("seqrec.stages.train", "seqrec.models.wide", root=root)) == sorted(
        [*STAGE, *BASE, *DATA, *own]
    )


def test_a_misspelt_module_is_an_error(root):
    with pytest.raises(ValueError, match=r"seqrec\.stages\.fit is not a module"):
        closure("seqrec.stages.fit", root=root)


@pytest.mark.parametrize(
    ("file", "models"),
    [
        ("caser", {"caser"}),
        ("recformer", {"recformer"}),  # the stage pretrain imports it, for text models only
        ("sasrec", {"sasrec", "esasrec", "tisasrec", "ssept", "zesrec", "rec_denoiser", "recformer"}),
        ("base", set(REGISTRY)),
        ("ensemble", set(REGISTRY)),  # options.members
        ("__init__", set()),  # module and class of each architecture are compared instead
    ],
)
def test_an_edit_of_a_model_concerns_those_that_import_it(file, models):
    edited = Path(f"seqrec/models/{file}.py")
    assert {n for n in REGISTRY if edited in deciding("seqrec.stages.pretrain", REGISTRY.module(n))} == models


def test_a_model_of_ones_own_decides_with_what_it_imports(tmp_path, monkeypatch):
    text = "import numpy\nimport own_part\nfrom seqrec.models.caser import Caser\n\n\nclass Mine(Caser): pass\n"
    (tmp_path / "own_model.py").write_text(text)
    (tmp_path / "own_part.py").write_text("import own_detail")
    (tmp_path / "own_detail.py").write_text("def scale():\n    from . import own_scale")
    (tmp_path / "own_scale.py").write_text("SCALE = 1")
    (tmp_path / "unread.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REGISTRY, "mine", importlib.import_module("own_model").Mine)

    assert (REGISTRY.place("mine"), name_of(REGISTRY["mine"])) == ("own_model:Mine", "mine")
    found = deciding("seqrec.stages.finetune", REGISTRY.module("mine"))
    assert Path("seqrec/models/caser.py") in found
    own = ("own_detail.py", "own_model.py", "own_part.py", "own_scale.py")
    assert [path for path in found if path.is_absolute()] == [tmp_path / name for name in own]


def test_an_edit_of_what_picks_the_training_rows_or_of_the_model_changes_the_fingerprint(root, monkeypatch):
    monkeypatch.setattr(resume, "ROOT", root)

    def identity():
        return resume.fingerprint("seqrec.stages.train", "seqrec.models.wide", FinetuneConfig())

    before = identity()
    (root / "seqrec/models/other.py").write_text("# edited")
    assert identity() == before
    for file in ("seqrec/data/draws.py", "seqrec/models/wide.py", "seqrec/artifacts.py"):
        (root / file).write_text("X = 2")
        assert identity() != before
        before = identity()
