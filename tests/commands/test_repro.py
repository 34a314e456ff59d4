"""What `make repro` prints of DVC's lines."""

import io
import json

import pytest
from dvc.lock import make_lock
from rich.console import Console

from seqrec.commands import repro

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
    lines = console.file.getvalue().splitlines()
    assert lines == [
        *("prepare ...", "prepare done in 0.0 s", "register ...", "what the stage itself prints"),
        "register done in 0.0 s",
    ]


def test_the_table_has_the_seconds_of_each_and_of_all():
    console = Console(file=io.StringIO(), width=80)
    console.print(repro.summary([("prepare", 1.25), ("register", 20.0)], 22.0))

    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert rows == [["stage", "s"], ["prepare", "1.2"], ["register", "20.0"], ["together", "22.0"]]


@pytest.mark.parametrize(("content", "stays"), [("", False), ('{"read": {', False), ('{"read": {}}', True)])
def test_a_list_of_locks_that_a_killed_dvc_left_half_written_is_removed(tmp_path, content, stays):
    (tmp_path / "rwlock").write_text(content)

    repro.remove_torn_lock(tmp_path)

    assert (tmp_path / "rwlock").exists() is stays
    if stays:
        assert json.loads((tmp_path / "rwlock").read_text()) == json.loads(content)


def test_a_list_of_locks_that_another_dvc_is_writing_stays(tmp_path):
    (tmp_path / "rwlock").write_text("")

    with make_lock(str(tmp_path / "rwlock.lock"), tmp_dir=str(tmp_path)):
        repro.remove_torn_lock(tmp_path)

    assert (tmp_path / "rwlock").exists()
    repro.remove_torn_lock(tmp_path / "nowhere")
