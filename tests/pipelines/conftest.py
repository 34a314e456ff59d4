from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def forked_steps(warm_steps):
    """Let the steps of KFP's local runner be forks of the warm process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_steps.items():
            patch.setenv(name, value)
        yield
