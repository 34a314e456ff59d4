"""Tiny real objects that several tests use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from models import REGISTRY
from models.base import Batch, Catalogue
from seqrec import artifacts
from seqrec.artifacts import sha256, write_json, write_table
from seqrec.config import PrepareConfig
from seqrec.stages.prepare import prepare


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(params=sorted(REGISTRY))
def architecture(request):
    """Every architecture: its name and class."""
    return request.param, REGISTRY[request.param]


def make_model(architecture: str, *, num_items: int = 30, num_users: int = 8, length: int = 12, **options):
    cls = REGISTRY[architecture]
    small = {"d_model": 16, "length": length} | options
    return cls(cls.Options(**small), Catalogue(num_items=num_items, num_users=num_users, length=length))


def make_batch(rows: list[list[int]], *, user: int = 1) -> Batch:
    """Left-pad `rows` of items; one event a minute."""
    length = max(len(row) for row in rows)
    items = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    times = torch.arange(1 - length, 1).float().mul(60).repeat(len(rows), 1).masked_fill(items == 0, 0)
    return Batch(items, times, torch.full((len(rows),), user))


def write_interactions(folder: Path, rows: list[tuple[str, str, int]]) -> None:
    """Write (user_id, item_id, timestamp) rows as an ingested and validated dataset."""
    users, items, times = ([row[i] for row in rows] for i in range(3))
    columns = [users, items, times, list(range(len(rows))), [None] * len(rows)]
    arrays = [pa.array(c, type=f.type) for c, f in zip(columns, artifacts.INTERACTIONS_SCHEMA, strict=True)]
    write_table(folder / artifacts.INTERACTIONS, pa.table(arrays, schema=artifacts.INTERACTIONS_SCHEMA))
    titles = sorted(set(items))
    item_table = pa.table([titles, [f"Title of {item}" for item in titles]], schema=artifacts.ITEMS_SCHEMA)
    write_table(folder / artifacts.ITEMS, item_table)
    verdict = {"success": True, "input_sha256": sha256(folder / artifacts.INTERACTIONS)}
    write_json(folder / "validation.json", verdict)


def synthetic_rows(users: int = 60, items: int = 40, events: int = 15, seed: int = 0) -> list[tuple[str, str, int]]:
    """A log with a pattern to learn: the next item is mostly the previous one plus one."""
    generator = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        item = int(generator.integers(items))
        for event in range(events + int(generator.integers(5))):
            rows.append((f"u{user}", f"i{item}", 1_000_000 + 1000 * event + user))
            item = (item + 1) % items if generator.random() < 0.8 else int(generator.integers(items))
    return rows


def prepare_rows(folder: Path, rows: list[tuple[str, str, int]], **config) -> Path:
    """Return the folder of the prepared dataset made from `rows`."""
    write_interactions(folder, rows)
    prepare(
        dataset="synthetic",
        data=folder,
        validation=folder / "validation.json",
        sequences=folder / "sequences",
        config=PrepareConfig(**config),
    )
    return folder / "sequences"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """The synthetic log, prepared with the defaults."""
    return prepare_rows(tmp_path_factory.mktemp("prepared"), synthetic_rows())
