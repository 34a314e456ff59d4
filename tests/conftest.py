"""Fixtures that several tests use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from support import prepare_rows, synthetic_rows

from models import REGISTRY

if "PYTEST_XDIST_WORKER" in os.environ:  # a process without a main module, which pyspark's import would end
    sys.modules["pyspark.sql.connect"] = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(params=sorted(REGISTRY))
def architecture(request):
    """Every architecture: its name and class."""
    return request.param, REGISTRY[request.param]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """The synthetic log, prepared with the defaults."""
    return prepare_rows(tmp_path_factory.mktemp("prepared"), synthetic_rows())
