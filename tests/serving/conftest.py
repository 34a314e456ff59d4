"""Models and a store that the tests of the service share."""

from __future__ import annotations

import pytest
from support import save, service

from seqrec.serving.events import Store
from seqrec.serving.recommender import Recommender


@pytest.fixture(scope="session")
def recommender(prepared, tmp_path_factory):
    return Recommender.load(save("sasrec", prepared, tmp_path_factory.mktemp("served"), model="sasrec"))


@pytest.fixture(scope="session")
def other(prepared, tmp_path_factory):
    """A model that answers otherwise."""
    return Recommender.load(save("fpmc", prepared, tmp_path_factory.mktemp("served"), model="fpmc"))


@pytest.fixture(scope="session")
def address(recommender):
    """Where a service of that model answers."""
    with service(recommender) as address:
        yield address


@pytest.fixture
def store(tmp_path):
    return Store(f"sqlite:///{tmp_path}/events.db")
