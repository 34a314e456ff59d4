"""A tracking database for the tests of a file, which use names and fingerprints of their own."""

from __future__ import annotations

import pytest

from seqrec.config import RegisterConfig
from seqrec.tracking import runs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return RegisterConfig(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('tracking')}/mlflow.db", graph=False)


@pytest.fixture(scope="module")
def client(config):
    return runs.connect(config)
