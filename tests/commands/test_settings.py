"""`seqrec settings`: a stage of dvc.yaml runs again exactly when a setting or code that it reads has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo
from support import ROOT, with_values

from seqrec.artifacts import read_json, write_json
from seqrec.commands.auto_training import model_settings
from seqrec.commands.settings import check, forget_edited_files, resolve, settings
from seqrec.config import ConfigError, from_dict, load
from seqrec.pipeline import STAGES
from seqrec.training.auto_settings import Shape

SETTINGS = {
    "dataset": "tiny",
    "sources": ["other"],
    "leaderboard": ["sasrec", "gru4rec"],
    "finetune": {"epochs": 3},
    "datasets": {name: {"ingest": {"source": "csv", "interactions": f"{name}.csv"}} for name in ("tiny", "other")},
    "models": {"sasrec": {}, "gru4rec": {"options": {"dropout": 0.1}}},
}
EVERY_STAGE = sorted(
    f"{stage.name}{suffix}"
    for stage in STAGES
    for suffix in {"run": [""], "dataset": ["", "_source@other"], "model": ["@sasrec", "@gru4rec"]}[stage.each]
)
CHANGES = {  # what is set -> which stages have changed themselves; DVC adds those after them
    "a default written out": (
        {"finetune.batch_size": 128, "models.sasrec.architecture": "sasrec", "tune.trials": 7},
        [],
    ),
    "a model's learning rate": ({"models.gru4rec.finetune.learning_rate": 0.01}, ["finetune@gru4rec"]),
    "an option of all models": ({"datasets.tiny.options.length": 20}, ["pretrain@gru4rec", "pretrain@sasrec"]),
    "dataset": (
        {"dataset": "other", "sources": ["tiny"]},
        [
            *("ingest", "ingest_source@tiny", "prepare", "prepare_source@tiny", "pretrain@gru4rec", "pretrain@sasrec"),
            *("validate", "validate_source@tiny"),
        ],
    ),
    "a source's filter": ({"datasets.other.prepare.min_user_events": 3}, ["prepare_source@other"]),
    "top k": ({"evaluate.top_k": 30}, ["baselines", "evaluate@gru4rec", "evaluate@sasrec"]),
    "gate": ({"register.min_gain": 0.01}, ["register"]),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project whose every stage has run, as far as DVC can tell: the outputs are made up."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("seqrec", "models", "components", "pipelines"):  # the first has links to the others
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dvc.yaml", folder)
    (folder / "my").mkdir()
    (folder / "configs").mkdir()
    (folder / "configs/reference.json").write_text("{}")
    settle(folder, SETTINGS)
    with pytest.MonkeyPatch.context() as patch, Repo.init(str(folder), no_scm=True) as repo:
        patch.chdir(folder)
        for out in (out for stage in repo.index.stages for out in stage.outs if not Path(out.fs_path).exists()):
            path = Path(out.fs_path)
            (path if not path.suffix else path.parent).mkdir(parents=True, exist_ok=True)
            (path if path.suffix else path / "file").write_text(out.def_path)
        repo.commit(force=True)
    return folder


def settle(folder: Path, content: dict) -> None:
    """Write params.yaml, and do what the stage `settings` does."""
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    shutil.rmtree(folder / "settings", ignore_errors=True)  # DVC removes the outputs of a stage before it runs
    for name, values in resolve(load(folder / "params.yaml"), root=folder).items():
        write_json(folder / "settings" / f"{name}.json", values)


def changed(folder: Path) -> dict[str, list]:
    """Return what `dvc status` says."""
    with Repo(str(folder)) as repo:
        return repo.status()


def stale(folder: Path) -> list[str]:
    """Return the stages that DVC would run because of the settings and code themselves."""
    return sorted(set(changed(folder)) - {"settings"})


@pytest.mark.parametrize(("changes", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_changed_setting_reruns_what_reads_it(project, changes, expected, monkeypatch):
    monkeypatch.chdir(project)
    settle(project, with_values(SETTINGS, changes))
    assert stale(project) == expected


def test_an_edited_file_of_the_user_reruns_its_ingest(project, monkeypatch):
    monkeypatch.chdir(project)
    log, written = Path("other.csv"), Path("settings/sources/other/ingest.json")
    log.write_bytes(b"one")
    settle(project, SETTINGS)
    assert stale(project) == ["ingest_source@other"]

    forget_edited_files(load(project / "params.yaml"), project / "settings")
    assert written.exists()
    log.write_bytes(b"two")  # of the same length
    forget_edited_files(load(project / "params.yaml"), project / "settings")
    assert not written.exists()
    log.unlink()


def test_dvc_sees_the_values_that_differ_and_files_in_the_folders_of_code_and_of_the_user(project, monkeypatch):
    monkeypatch.chdir(project)
    settle(project, SETTINGS)
    assert stale(project) == []
    new = [project / name for name in ("my/events.csv", "seqrec/new.py", "models/new.py")]
    for path in new:
        path.write_text("one")
    assert {"changed deps": dict.fromkeys(("my", "seqrec", "models"), "modified")} in changed(project)["settings"]
    for path in new:
        path.unlink()

    settle(project, with_values(SETTINGS, {"models.gru4rec.finetune.learning_rate": 0.01}))
    assert changed(project)["finetune@gru4rec"] == [
        {"changed deps": {"settings/gru4rec/finetune.json": {"config": "modified"}}}
    ]


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("seqrec/stages/evaluate.py", "", ["baselines", "evaluate@gru4rec", "evaluate@sasrec"]),
        ("seqrec/models/baselines.py", "", ["baselines", "register"]),
        ("seqrec/config/sections.py", "", []),
        (
            "seqrec/models/gru4rec.py",
            "",
            ["evaluate@gru4rec", "finetune@gru4rec", "pretrain@gru4rec", "register"],
        ),
        ("seqrec/models/caser.py", "", []),  # not on the leaderboard
        ("seqrec/artifacts.py", "", EVERY_STAGE),
        ("seqrec/stages/validate.py", "from seqrec.data import item_tokens", ["validate", "validate_source@other"]),
    ],
)
def test_changed_code_reruns_what_imports_it(project, file, line, expected, monkeypatch):
    monkeypatch.chdir(project)
    original = (project / file).read_text()
    try:
        (project / file).write_text(f"{original}\n# changed\n{line}\n")
        settle(project, SETTINGS)
        assert stale(project) == expected
        code = read_json(project / "settings/validate.code.json")
        assert ("seqrec/data/item_tokens.py" in code) == bool(line)
    finally:
        (project / file).write_text(original)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models.gru4rec.options.drop": 0.2}, "models.gru4rec.options.drop: unknown key"),
        ({"models.gru4rec.architecture": "gru5rec"}, "models.gru4rec.architecture: 'gru5rec' is not one of sasrec"),
        ({"models.pctm": {}, "leaderboard": ["pctm"]}, "models.pctm: pctm is a baseline, which every run computes"),
        ({"models.summary": {"architecture": "sasrec"}, "leaderboard": ["summary"]}, "models.summary: a folder"),
        (
            {"models.gru4rec": {"architecture": "caser", "options": {"layers": "auto"}}},
            "models.gru4rec.options.layers: unknown key",
        ),
        (
            {"models.gru4rec": {"architecture": "esasrec", "options": {"attribute_values": "auto"}}},
            "models.gru4rec.options.attribute_values: ",
        ),
        ({"models.gru4rec.options.objective": "cloze"}, "models.gru4rec.options.objective: cloze is not one of causal"),
        ({"models.gru4rec.options": {"members": 2, "item_bias": True}}, "models.gru4rec.options: members: GRU4Rec"),
        (
            {"models.gru4rec": {"architecture": "s3rec", "options": {"members": 2}}},
            "models.gru4rec.options: members: must be 1, because S3Rec cannot",
        ),
        ({"models.gru4rec.options.dropout": float("nan")}, "models.gru4rec.options: dropout must be"),
        (
            {"datasets.other.ingest.source": "cvs"},
            "datasets.other.ingest.source: there is no source 'cvs'; the sources are",
        ),
        ({"datasets.tiny.ingest.category": "Gift_Cards"}, "datasets.tiny.ingest.category: has no effect"),
        ({"leaderboard": []}, "leaderboard: names no model"),
        ({"datasets.other.ingest.events": True}, "datasets.other.ingest.events: DVC cannot track the event store"),
    ],
)
def test_options_and_sources_are_checked_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        settings(output=tmp_path / "settings", params=with_values(SETTINGS, changes))
    assert str(error.value).startswith(message)
    assert not (tmp_path / "settings").exists()


def test_a_setting_that_the_protocol_the_loss_or_the_objective_does_not_read_is_named(tmp_path, caplog):
    changes = {"prepare.test_share": 0.2, "finetune.loss": "gbce", "finetune.gbce_t": 0.5, "finetune.negatives": 9}
    settings(output=tmp_path / "settings", params=with_values(SETTINGS, changes))
    assert "tiny: prepare.test_share has no effect with LOO-full, only with RATIO-full or temporal" in caplog.text
    assert "finetune" not in caplog.text
    settings(output=tmp_path / "settings", params=with_values(SETTINGS, changes | {"finetune.loss": "bce"}))
    assert "models.sasrec: finetune.gbce_t has no effect with bce, only with gbce" in caplog.text
    assert "negatives" not in caplog.text
    settings(output=tmp_path / "settings", params=with_values(SETTINGS, changes | {"finetune.loss": "ce"}))
    assert "finetune.negatives has no effect with ce, only with sampled_ce or bce or gbce or bpr" in caplog.text
    settings(output=tmp_path / "settings", params=with_values(SETTINGS, {"finetune.mask_probability": 0.3}))
    assert "models.sasrec: finetune.mask_probability has no effect with causal, only with cloze" in caplog.text


def test_the_rules_set_nothing_that_the_loss_does_not_read(caplog):
    chosen = model_settings("sasrec", Shape(users=9, items=9, events=99, median=9.0, ninth=9.0, longest=9), {})
    check(from_dict({"dataset": "tiny", "models": {"sasrec": chosen}}), ingests=False)
    assert chosen["finetune"]["loss"] == "ce"
    assert "no effect" not in caplog.text


def test_networks_that_read_words_may_have_members(tmp_path):
    words = {"architecture": "flash4rec", "options": {"attribute_values": 8, "members": 2}}
    content = with_values(SETTINGS, {"models.gru4rec": words, "datasets.tiny.ingest.items": "items.csv"})
    settings(output=tmp_path / "settings", params=content)
    assert read_json(tmp_path / "settings/gru4rec/pretrain.json")["architecture"]["options"] == words["options"]
