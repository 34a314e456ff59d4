"""A training that is killed leaves the old result or the new one, whole; the same command repairs what there is."""

import shutil
import sys

import pytest
import torch
from support import run

from seqrec.artifacts import replaced
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.tensors import save_tensors

ONE_STEP = {"batch_size": 100}  # an epoch
WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile")


class KilledError(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Killer:
    """Ends the process, as it were, at the N-th change below a folder; an audit hook cannot be taken away again."""

    def __init__(self):
        self.folder, self.left = None, 0
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if self.folder is None or event not in WRITES:
            return
        named = [str(one) for one in arguments if isinstance(one, str | bytes) or hasattr(one, "__fspath__")]
        if not any(name.startswith(self.folder) for name in named) or (event == "open" and arguments[1] == "r"):
            return
        self.left -= 1
        if self.left == 0:
            raise KilledError


@pytest.fixture(scope="module")
def killer():
    hook = Killer()
    yield hook
    hook.folder = None


def epochs_of(folder):
    """Return the epochs that card and history agree on, after loading all files, whose hashes the card has."""
    checkpoint = load_checkpoint(folder)
    records = checkpoint.epoch_records()
    assert checkpoint.card["config"]["epochs"] == len(records) == records[-1]["epoch"]
    return len(records)


def test_a_killed_retraining_leaves_one_whole_result(prepared, tmp_path, killer):
    """The old training has one epoch, the new one two; killed at changes of the folder and its neighbours."""
    old = tmp_path / "old"
    run(prepared, old, epochs=1, **ONE_STEP)

    def retrained(kill):
        """Return what `kill` changes leave, 0 for none killed, and the changes there were in all."""
        out = tmp_path / f"killed at {kill}"
        shutil.copytree(old, out)
        killer.folder, killer.left = str(out / "finetuned"), kill
        try:
            run(prepared, out, epochs=2, **ONE_STEP)
        except KilledError:
            pass
        finally:
            killer.folder = None
        return out, kill - killer.left

    _, writes = retrained(1000)
    assert writes > 8
    found = []
    for kill in (1, writes // 2, writes - 3, writes - 2):  # the last two: before and after the folders are exchanged
        out, _ = retrained(kill)
        found.append(epochs_of(out / "finetuned"))
        run(prepared, out, epochs=2, **ONE_STEP)
        assert epochs_of(out / "finetuned") == 2
    assert found[0] == 1
    assert found[-1] == 2
    assert {path.name for path in out.iterdir()} <= {"finetuned", "finetuned.partial", "initial", "state"}


@pytest.mark.parametrize("platform", [sys.platform, "other"])  # one that cannot exchange two names
def test_a_folder_is_replaced_and_an_error_leaves_the_old_one(tmp_path, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    folder = tmp_path / "folder"
    with replaced(folder) as new:
        (new / "a").write_text("old")
    with pytest.raises(FileNotFoundError), replaced(folder) as new:
        (new / "no folder" / "a").write_text("new")

    assert (folder / "a").read_text() == "old"
    with replaced(folder) as new:
        assert list(new.iterdir()) == []
        (new / "b").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "b"]


def test_whoever_may_read_the_card_may_read_the_weights(tmp_path):
    save_tensors(tmp_path / "best.safetensors", {"weight": torch.zeros(2)})
    (tmp_path / "config.json").write_text("{}")

    modes = {(tmp_path / name).stat().st_mode for name in ("best.safetensors", "config.json")}
    assert len(modes) == 1
