"""What `make repro` prints of DVC's lines."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from dvc.lock import make_lock
from dvc.repo import Repo
from rich.console import Console
from support import until

from seqrec import locks
from seqrec.artifacts import CHANGES
from seqrec.commands import repro
from seqrec.commands.settings import settings
from seqrec.config import ConfigError, load

DVC = """\
'data/raw.dvc' didn't change, skipping
Stage 'ingest' didn't change, skipping
Running stage 'prepare':
> python -m seqrec prepare
Updating lock file 'dvc.lock'

Running stage 'register':
> python -m seqrec register
what the stage itself prints
Updating lock file 'dvc.lock'
To track the changes with git, run:

\tgit add dvc.lock
Use `dvc push` to send your updates to remote storage.
"""


def test_a_stage_is_one_line_at_its_start_and_one_with_seconds_and_housekeeping_is_hidden():
    console = Console(file=io.StringIO(), width=80)
    times = list(repro.stages(DVC.splitlines(keepends=True), console))

    assert [name for name, _ in times] == ["prepare", "register"]
    lines = re.sub(r"\d\.\d s", "0.0 s", console.file.getvalue()).splitlines()
    assert lines == [
        *("prepare ...", "prepare done in 0.0 s", "register ...", "what the stage itself prints"),
        "register done in 0.0 s",
    ]


def test_a_list_of_locks_that_a_killed_dvc_left_half_written_is_removed_unless_one_is_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("dvc.lock.DEFAULT_TIMEOUT", 0.06)  # s, in which the lock is tried to be taken
    monkeypatch.chdir(tmp_path)
    repro.remove_left_locks()
    repro.DVC_FILES.mkdir(parents=True)
    left = repro.DVC_FILES / "rwlock"
    left.write_text('{"read": {')

    with make_lock(f"{left}.lock", tmp_dir=str(repro.DVC_FILES)):
        repro.remove_left_locks()
        assert left.exists()
    repro.remove_left_locks()
    assert not left.exists()


@pytest.mark.parametrize(("arguments", "stays"), [(["dvc", "repro"], True), (["other"], False)])
def test_locks_of_a_killed_dvc_are_removed_even_if_another_process_has_its_number(
    tmp_path, monkeypatch, arguments, stays
):
    monkeypatch.chdir(tmp_path)
    repro.DVC_FILES.mkdir(parents=True)
    left = repro.DVC_FILES / "rwlock"
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE) as process:
        holder = {"pid": process.pid, "cmd": "dvc repro"}
        left.write_text(json.dumps({"write": {"a": holder}, "read": {"b": [holder]}}))
        time.sleep(0.2)  # until it has its own command line

        repro.remove_left_locks()

        assert left.exists() is stays
        process.kill()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)  # nobody has waited for it
        repro.remove_left_locks()
        assert not left.exists()


WHOLE = """\
schema: '2.0'
stages:
  ingest:
    cmd: ingest
    outs:
    - path: data
      hash: md5
      md5: 8c7dd922ad47494fc02c388e12c00eac
      size: 1
"""


@pytest.mark.parametrize(("cut", "kept"), [(0, True), (16, True), (WHOLE.index("cmd"), True), (16, False)])
def test_a_lock_file_that_a_killed_dvc_left_half_written_is_that_before_the_run(
    tmp_path, monkeypatch, cut, kept, caplog
):
    monkeypatch.chdir(tmp_path)
    lock = Path("dvc.lock")
    repro.DVC_FILES.mkdir(parents=True)
    lock.write_text(WHOLE)
    if kept:
        repro.repair_lock_file()
    assert lock.read_text() == WHOLE
    lock.write_text(WHOLE[:cut])

    repro.repair_lock_file()

    assert "dvc.lock was left half written" in caplog.text
    assert (lock.read_text() if kept else lock.exists()) == (WHOLE if kept else False)


STAGES = """\
stages:
  baselines: {cmd: touch baselines, outs: [baselines]}
  pretrain: &model
    matrix: {model: [slow, broken, later]}
    cmd: touch ${item.model}.initial
    outs: ["${item.model}.initial"]
  finetune: {<<: *model, cmd: "exec sh ${item.model}.sh", outs: ["${item.model}.finetuned"]}
  evaluate: {<<: *model, cmd: "touch ${item.model}.metrics", outs: ["${item.model}.metrics"]}
"""


def test_models_are_trained_side_by_side_until_one_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "dvc.yaml").write_text(STAGES)
    wait = "while ! [ -e {} ]; do sleep 0.1; done".format
    (tmp_path / "broken.sh").write_text(f"{wait('begun')}; echo no memory >&2; echo $PPID > dvc; exit 1")
    ended = "while kill -0 $(cat dvc) 2> error; do sleep 0.1; done; sleep 0.5"  # the DVC of the broken one
    (tmp_path / "slow.sh").write_text(f"touch begun; {wait('dvc')}; {ended}; env > slow.finetuned; echo trained")
    Repo.init(no_scm=True).close()
    dvc = repro.Dvc(Console(file=io.StringIO(), width=80), os.environ)

    with pytest.raises(ValueError, match="finetune@broken failed"):
        repro.side_by_side(dvc, dvc.out_of_date(), ["slow", "broken", "later"], jobs=2, cores=6)

    printed = dvc.console.file.getvalue()
    assert "broken: no memory\n" in printed
    assert "slow: trained\n" in printed
    assert "later" not in printed
    assert "baselines" not in printed
    assert "OMP_NUM_THREADS=3\n" in (tmp_path / "slow.finetuned").read_text()
    ran = {"pretrain@slow", "finetune@slow", "evaluate@slow", "pretrain@broken", "finetune@broken"}
    assert dvc.seconds.keys() == ran
    assert yaml.safe_load((tmp_path / "dvc.lock").read_text())["stages"].keys() == ran - {"finetune@broken"}


PARAMS = """\
dataset: toy # with a comment
datasets: {toy: {ingest: {source: csv, interactions: a.csv}, finetune: {epochs: 9}}}
models: {sasrec: {}}
"""


@pytest.fixture
def params(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path / "params.yaml"


def test_what_params_links_to_stays_as_it_was(params):
    shared = params.rename(params.with_name("shared.yaml"))
    shared.write_bytes(PARAMS.replace("\n", "\r\n").encode())
    shared.chmod(0o664)
    params.symlink_to(shared.name)
    with repro.changed({"finetune.epochs": 3}) as environment:
        assert load(params).section("finetune", model="sasrec").epochs == 3
        assert json.loads(environment[CHANGES]) == {"finetune.epochs": 3}
        assert shared.stat().st_mode & 0o777 == 0o664

    assert params.is_symlink()
    assert params.read_bytes() == PARAMS.replace("\n", "\r\n").encode()
    assert shared.stat().st_mode & 0o777 == 0o664


def test_params_are_replaced_in_one_step(params):
    """A process that is killed meanwhile must not leave half of them."""
    with params.open() as reader, repro.changed({"finetune.epochs": 3}):
        assert reader.read() == PARAMS


def test_what_dvc_reads_from_params_may_not_be_left_out(params):
    with pytest.raises(ConfigError, match="leaderboard is missing"):
        repro.repro()


def test_models_that_the_data_cannot_feed_are_left_out(params, caplog):
    text = PARAMS.replace("{sasrec: {}}", "{sasrec: {}, fdsa: {}, recformer: {}}")
    params.write_text(text)
    with repro.changed({}):
        assert load(params).leaderboard == ("sasrec",)

    assert params.read_text() == text
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"{name} is left out" for name in ("fdsa", "recformer")
    ]
    with pytest.raises(ConfigError, match=r"leaderboard: fdsa reads the items' columns.*set ingest.items"):
        settings(output=params.parent / "settings", params=yaml.safe_load(text))
    text = text.replace("interactions: a.csv", "interactions: a.csv, items: b.csv")
    params.write_text(text)
    with repro.changed({}):
        assert params.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models.sasrec.options.layer": 3}, "unknown key; did you mean"),
        ({"leaderboard": []}, "leaderboard: names no model"),
        ({"ingest.events": True}, "datasets.toy.ingest.events: DVC cannot track the event store"),
    ],
)
def test_a_wrong_change_runs_nothing_and_leaves_params_as_they_were(params, change, message):
    with pytest.raises(ConfigError, match=message), repro.changed(change):
        pytest.fail("the run began")

    assert params.read_text() == PARAMS


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "killed"])
@pytest.mark.parametrize("edited", [True, False])
def test_params_are_as_before_after_a_run_with_changes_and_an_edit_is_kept_aside(params, ended, edited):
    run = repro.changed({"finetune.epochs": 3})
    run.__enter__()
    assert params.read_text() != PARAMS
    if edited:
        params.write_text("edited")
    if ended:
        run.__exit__(None, None, None)
    else:
        with repro.changed({}):
            assert params.read_text() == PARAMS
        run.gen.close()

    assert params.read_text() == PARAMS
    aside = params.with_suffix(".edited.yaml")
    assert (aside.read_text() if aside.exists() else "") == ("edited" if edited else "")


def test_two_calls_in_one_project_do_not_change_its_settings_at_once(params):
    with locks.locked(repro.DVC_FILES / "repro.lock", "make repro"), pytest.raises(locks.LockedError):
        repro.repro(changes="finetune.epochs=3")
    assert params.read_text() == PARAMS
