from __future__ import annotations

import pytest

from seqrec import warm
from seqrec.pipelines.local import EXECUTOR


@pytest.fixture(scope="session")
def warm_steps():
    """The variables of one process that imports what steps need, for all pipelines of the tests."""
    modules = (EXECUTOR, "mlflow", "great_expectations", "seqrec.stages.register")
    with warm.process(*modules, wait=True, _KFP_RUNTIME="true") as variables:
        yield variables


@pytest.fixture(scope="module")
def forked_steps(warm_steps):
    """Let the steps of KFP's local runner be forks of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_steps.items():
            patch.setenv(name, value)
        yield
