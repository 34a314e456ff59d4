"""Fixtures that several tests use."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import cheaper  # noqa: F401
import pytest

# Where tests run in several processes, the one that starts them reads this file first: it imports no torch.
from seqrec import warm

if "PYTEST_XDIST_WORKER" in os.environ:  # a process without a main module, which pyspark's import would end
    sys.modules["pyspark.sql.connect"] = None  # type: ignore[assignment]

# A test has a tracking server and a store of events only if it names them itself.
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "SEQREC_STORE"):
    os.environ.pop(name, None)

# The files that take longest, in this order: a worker that got one of them last would keep the others waiting.
LONGEST = (
    "test_end_to_end.py",
    "test_pipelines.py",
    "test_retraining.py",
    "test_onnx_graph.py",
    "test_register.py",
    "test_loop.py",
    "test_launch.py",
    "test_submission.py",
    "test_tune.py",
    "test_every_model.py",
    "test_everywhere.py",
    "test_rec_denoiser.py",
    "test_recformer.py",
    "test_users.py",
)


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish():
    if "mlflow" in sys.modules:
        import unsynced  # noqa: F401
    if "onnxscript" in sys.modules:  # each export would read the operators of torch anew, for half a second
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    gc.freeze()  # a million objects of imported packages, which each full collection would visit


def pytest_generate_tests(metafunc):
    """Give a test whose argument `architecture` has no values of its own every one: its name and class."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "architecture" in metafunc.fixturenames and not any("architecture" in names for names in given):
        from seqrec.models import REGISTRY

        metafunc.parametrize("architecture", sorted(REGISTRY.items()), ids=sorted(REGISTRY))


@pytest.fixture(autouse=True)
def _one_seed():
    import torch

    from seqrec.counts.search import Tables

    torch.manual_seed(0)
    Tables.of.cache_clear()  # a test may change how tables are counted


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """The synthetic log, prepared with the defaults."""
    from support import prepare_rows, synthetic_rows

    return prepare_rows(tmp_path_factory.mktemp("prepared"), synthetic_rows())


@pytest.fixture
def data(prepared):
    """What was prepared, in memory."""
    from seqrec.data import sequences

    return sequences.load(prepared)


@pytest.fixture(scope="session")
def warm_steps(tmp_path_factory):
    """The variables of one process that imports what the stages need, also on Kubeflow, for all pipelines of tests."""
    import unsynced  # takes seconds

    from seqrec.commands import repro

    empty = tmp_path_factory.mktemp("mlflow") / "empty.db"
    empty.write_bytes(unsynced.EMPTY)
    modules = ("cheaper", "kfp.dsl.executor_main", "unsynced", "killer", "great_expectations", *repro.REGISTER)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings = {"_KFP_RUNTIME": "true", "PYTHONPATH": path, "EMPTY_DATABASE": str(empty)}
    with warm.process(*modules, wait=True, **settings) as variables:
        yield variables


@pytest.fixture(scope="module")
def forked_steps(warm_steps):
    """Let what asks for the warm process find it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_steps.items():
            patch.setenv(name, value)
        yield
