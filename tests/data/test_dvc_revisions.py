"""Ingesting what some revision of a DVC project has ingested, byte for byte."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo
from support import synthetic_rows, write_interactions

from seqrec.artifacts import INTERACTIONS, ITEMS, QUARANTINE, SOURCE_CARD, facts, sha256
from seqrec.config import ConfigError, IngestConfig, parse
from seqrec.stages.ingest import ingest

FILES = (INTERACTIONS, ITEMS, QUARANTINE, SOURCE_CARD)


def git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(project: Path, users: int) -> tuple[str, str]:
    """Ingest a log of so many users, push it to the remote; return the commit and the hash of the interactions."""
    data = project / "data"
    write_interactions(data, synthetic_rows(users=users))
    (data / QUARANTINE).write_bytes(b"no row was malformed")
    card = {"source": "csv", "category": "", "counts": {"rows": 900, "users": users}}
    (data / SOURCE_CARD).write_text(json.dumps(card))
    with Repo(str(project)) as repo:
        repo.commit(force=True)
        repo.push()
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", f"{users} users")
    return git(project, "rev-parse", "HEAD").strip(), sha256(data / INTERACTIONS)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A DVC project with two revisions, its cache emptied: all that is left is in the remote."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "--quiet")
    with Repo.init(str(folder)) as repo, repo.config.edit() as config:
        config["remote"] = {"store": {"url": str(tmp_path_factory.mktemp("remote"))}}
        config["core"] = {"remote": "store", "analytics": False}
    stage = {"cmd": "python -m seqrec ingest", "outs": [f"data/{name}" for name in FILES]}
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"ingest": stage}}))
    revisions = [commit(folder, users) for users in (20, 30)]
    for path in sorted((folder / ".dvc" / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return folder, revisions


def settings(project: Path, revision: str, **changes: str) -> IngestConfig:
    own = {"source": "csv", "interactions": "log.csv", "repository": str(project), "revision": revision}
    return IngestConfig(**own | changes)


def test_each_revision_gives_the_tables_that_its_lock_records(project, tmp_path):
    folder, revisions = project
    for revision, digest in revisions:
        output = tmp_path / revision
        values = ingest(dataset="own", output=output, downloads=tmp_path, config=settings(folder, revision))

        assert sha256(output / INTERACTIONS) == digest
        assert facts(output)["interactions_sha256"] == digest
        lock = yaml.safe_load(git(folder, "show", f"{revision}:dvc.lock"))
        assert len(lock["stages"]["ingest"]["outs"]) == len(FILES)
        assert values["rows"] == 900
        assert {path.name for path in output.iterdir()} == {*FILES, "raw"}  # DVC asks for every output
    assert revisions[0][1] != revisions[1][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": "0" * 40}, "ingest.repository: .* cannot be read"),
        ({"source": "ml-100k", "interactions": ""}, r"ingest\.source: .* ingested another source, csv"),
    ],
)
def test_a_wrong_revision_or_source_is_explained(project, tmp_path, changes, message):
    folder, revisions = project
    config = settings(folder, **{"revision": revisions[0][0], **changes})

    with pytest.raises(ConfigError, match=message):
        ingest(dataset="own", output=tmp_path / "data", downloads=tmp_path, config=config)


@pytest.mark.parametrize("stages", [{}, {"ingest": {"outs": [{"path": f"data/{INTERACTIONS}", "md5": "0"}]}}])
def test_a_lock_without_all_tables_is_explained(project, tmp_path, stages):
    folder, _ = project
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    git(folder, "commit", "--all", "--quiet", "--message", "without tables")
    revision = git(folder, "rev-parse", "HEAD").strip()
    git(folder, "reset", "--quiet", "--hard", "HEAD~1")

    with pytest.raises(ConfigError, match=r"ingest\.repository: dvc\.lock has no \S+ of the stage `ingest`"):
        ingest(dataset="own", output=tmp_path / "data", downloads=tmp_path, config=settings(folder, revision))


def test_a_damaged_file_replaces_nothing(project, tmp_path):
    folder, revisions = project
    output = tmp_path / "data"
    ingest(dataset="own", output=output, downloads=tmp_path, config=settings(folder, revisions[0][0]))
    before = sha256(output / INTERACTIONS)
    outs = yaml.safe_load(git(folder, "show", f"{revisions[1][0]}:dvc.lock"))["stages"]["ingest"]["outs"]
    md5 = next(out["md5"] for out in outs if out["path"].endswith(INTERACTIONS))
    with Repo(str(folder)) as repo:
        (stored,) = Path(repo.config["remote"]["store"]["url"]).rglob(f"{md5[:2]}/{md5[2:]}")
    content = stored.read_bytes()
    stored.chmod(0o600)
    stored.write_bytes(b"junk")
    try:
        with pytest.raises(ValueError, match=r"differs|cannot be read"):
            ingest(dataset="own", output=output, downloads=tmp_path, config=settings(folder, revisions[1][0]))
    finally:
        stored.write_bytes(content)
    assert not (output / SOURCE_CARD).exists()
    assert sha256(output / INTERACTIONS) == before


def test_a_lost_file_is_an_error(project, tmp_path):
    folder, revisions = project
    with Repo(str(folder)) as repo:
        remote = Path(repo.config["remote"]["store"]["url"])
    remote.rename(tmp_path / "lost")
    try:
        with pytest.raises(ValueError, match="cannot be read"):
            ingest(dataset="own", output=tmp_path / "d", downloads=tmp_path, config=settings(folder, revisions[0][0]))
    finally:
        (tmp_path / "lost").rename(remote)


@pytest.mark.parametrize(
    "section", [{"repository": "x"}, {"revision": "x"}, {"repository": "x", "revision": "y", "mirror": "z"}]
)
def test_half_a_revision_is_refused(section):
    with pytest.raises(ConfigError, match="repository"):
        parse(IngestConfig, {"source": "csv", **section}, "ingest")
