"""A project that was copied does not touch the original, and works after one command."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from support import save

from seqrec.__main__ import main
from seqrec.artifacts import sha256
from seqrec.config import ConfigError, RegisterConfig
from seqrec.serving.recommender import Recommender
from seqrec.tracking import registry, runs
from seqrec.tracking.relocate import COLUMNS, relocate
from seqrec.tracking.runs import TrackingError


@pytest.fixture(autouse=True)
def _own_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def copied(prepared, tmp_path):
    """A project with a champion, and a copy of it."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    config = settings(original)
    client = runs.connect(config)
    folder = save("mfbpr", prepared, tmp_path / "model", model="mfbpr", fingerprint="f")
    run = runs.open_run(client, runs.experiment(client, config), "f", "mfbpr")
    model = registry.log_model(client, run, checkpoint=folder)
    version = registry.create_version(client, "seqrec-toy", model, {})
    client.set_registered_model_alias("seqrec-toy", registry.CHAMPION, version.version)
    shutil.copytree(original, copy)
    return original, copy


def settings(folder: Path) -> RegisterConfig:
    return RegisterConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def hashes(folder):
    return {path.relative_to(folder): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_copy_is_refused_until_it_is_relocated_and_then_leaves_the_original_alone(copied, monkeypatch, caplog):
    original, copy = copied
    before = hashes(original)
    with pytest.raises(TrackingError, match=r"moved or copied.*`python -m seqrec registry relocate`"):
        Recommender.load("models:/seqrec-toy@champion", settings(copy))

    monkeypatch.chdir(copy)
    params = Path(__file__).parent.parent.parent / "params.yaml"
    assert main(["registry", "relocate", "--params", str(params)]) == 0
    assert main(["registry", "relocate", "--params", str(params)]) == 0  # once more changes nothing

    (backup,) = copy.glob("mlflow.db.*.backup")
    assert sqlite3.connect(backup).execute("SELECT artifact_location FROM experiments").fetchall()[-1] == (
        f"{original}/mlartifacts",
    )
    database = sqlite3.connect(copy / "mlflow.db")
    for table, columns in COLUMNS.items():
        for column in columns:
            places = [place for (place,) in database.execute(f"SELECT {column} FROM {table}")]
            assert places
            assert not [place for place in places if str(original) in str(place)]
    database.close()
    shutil.move(original, original.with_name("away"))  # nothing is read from there
    config = settings(copy)
    expected = Recommender.load("models:/seqrec-toy@champion", config).recommend(["i1"], 3)
    assert len(expected.items) == 3
    client = runs.connect(config)
    run = runs.open_run(client, runs.experiment(client, config), "another", "mfbpr")
    client.log_text(run.info.run_id, "of the copy", "note.txt")
    assert hashes(original.with_name("away")) == before


def test_relocate_wants_a_local_database_with_its_artifacts(copied, tmp_path):
    _, copy = copied
    with pytest.raises(ConfigError, match="is not a SQLite file"):
        relocate(RegisterConfig(tracking_uri="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="is not a SQLite file"):
        relocate(settings(tmp_path / "nowhere"))
    shutil.rmtree(copy / "mlartifacts")
    with pytest.raises(ConfigError, match="has no mlartifacts"):
        relocate(settings(copy))
