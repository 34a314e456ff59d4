"""The wheel: one top-level package, with everything that it needs, beside a package of the user's called `models`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import ROOT

FOLDERS = ("models", "components", "pipelines")
USE = """
import models
import seqrec
from seqrec.models import REGISTRY
from seqrec.pipeline import BY_NAME

print(models.MINE, seqrec.__file__, REGISTRY["sasrec"].__module__, seqrec.fit.__module__)
"""


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of this tree, built from a copy: an earlier build would leave files in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("seqrec", *FOLDERS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "tree" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "tree"))
    return next(folder.glob("*.whl"))


def test_its_only_package_is_seqrec_and_holds_every_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    wanted = [path for path in (ROOT / "seqrec").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted += [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    found = {path: sizes.get(f"seqrec/{path.relative_to(ROOT).as_posix().removeprefix('seqrec/')}") for path in wanted}

    assert {name.partition("/")[0] for name in sizes if ".dist-info/" not in name} == {"seqrec"}
    assert found == {path: path.stat().st_size for path in wanted}
    assert "seqrec/py.typed" in sizes


def test_it_works_beside_a_package_called_models(wheel, tmp_path):
    pip("install", "--no-deps", "--no-warn-conflicts", "--no-compile", "--target", str(tmp_path / "site"), str(wheel))
    (tmp_path / "own" / "models").mkdir(parents=True)
    (tmp_path / "own" / "models" / "__init__.py").write_text("MINE = 'mine'\n")

    environment = {"PYTHONPATH": f"{tmp_path / 'site'}:{tmp_path / 'own'}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    mine, place, module, library = done.stdout.split()
    assert (mine, module, library) == ("mine", "seqrec.models.sasrec", "seqrec.library")
    assert Path(place).is_relative_to(tmp_path / "site")
