"""Two processes (gloo) give the losses and metrics of one with the same global batch; also tests/cluster."""

import os
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from support import CONFIG, OPTIONS, free_port, losses_of, run_pretrain

from seqrec.artifacts import write_json
from seqrec.cluster.launch import execute

PLAIN = {"dropout": 0.0, "topk_dropout": 0.0, "jitter": 0.0, "balance": 0.0}  # processes draw different numbers
CONTRAST = {
    "architecture": {
        "architecture": "recformer",
        "options": {"length": 4, "d_model": 16, "d_inner": 32, "max_tokens": 64, "dropout": 0.0, "mlm_weight": 0.0},
    },
    "config": {"epochs": 1, "batch_size": 16, "warmup_steps": 2, "learning_rate": 1e-2, "seed": 1},
}


def work(rank: int, port: int, orders: list[Path]) -> None:
    """Be one of two processes, as torchrun starts them; tests/cluster starts them with it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the process that this one is a copy of
    for order in orders:
        execute(order)
    assert PartialState().num_processes == 2


def order_contrast(prepared: Path, folder: Path) -> Path:
    """Write the order of a contrastive pre-training, as `execute` reads it; return its path."""
    paths = {"sequences": prepared, "data": prepared.parent, "initial": folder / "finetuned", "state": folder / "state"}
    return write_order(folder, "pretrain", paths, model="recformer", **CONTRAST)


def order_training(prepared: Path, folder: Path) -> Path:
    """Initialise a FLASH4Rec and write the order of its training; return its path."""
    run_pretrain("flash4rec", prepared.parent, folder, OPTIONS["flash4rec"] | PLAIN, seed=1)
    paths = {name: folder / name for name in ("initial", "state")}
    paths |= {"sequences": prepared, "checkpoint": folder / "finetuned"}
    return write_order(folder, "finetune", paths, model="flash4rec", config=CONFIG | {"epochs": 2})


def write_order(folder: Path, stage: str, paths: dict[str, Path], **arguments) -> Path:
    arguments |= {name: str(path) for name, path in paths.items()} | {"filter_seen": True}
    write_json(folder / "order.json", {"stage": stage, "arguments": arguments})
    return folder / "order.json"


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """Every training by one process, below `one`, and by two, below `two`; the two are started once for all."""
    root = tmp_path_factory.mktemp("trained")
    orders = {
        number: [order_contrast(prepared, root / number / "contrast"), order_training(prepared, root / number / "task")]
        for number in ("one", "two")
    }
    for order in orders["one"]:
        execute(order)
    torch.multiprocessing.start_processes(work, (free_port(), orders["two"]), nprocs=2, start_method="fork")
    return root


@pytest.mark.parametrize(("kind", "tolerance"), [("contrast", 1e-4), ("task", 1e-5)])
def test_two_processes_equal_one(trained, kind, tolerance):
    """Of a contrast with the whole batch too."""
    for got, expected in zip(losses_of(trained / "two" / kind), losses_of(trained / "one" / kind), strict=True):
        assert got.pop("phase") == expected.pop("phase")
        exact = [name for name in expected if not name.startswith("figure/")]  # means of each process's own tokens
        expected_of = {name: expected[name] for name in exact}
        assert {name: got[name] for name in exact} == pytest.approx(expected_of, rel=tolerance)
        assert got.keys() == expected.keys()
