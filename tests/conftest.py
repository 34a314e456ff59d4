"""Tiny real objects that several tests use."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
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

if "PYTEST_XDIST_WORKER" in os.environ:  # a process without a main module, which pyspark's import would end
    sys.modules["pyspark.sql.connect"] = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


# Facts about an architecture that its class does not tell; one that is not named has none.
SMALL: dict[str, dict] = {"recformer": {"d_inner": 32}}  # options that a small model of it needs
MEMORY = {"fpmc": 1, "mfbpr": 0}  # most recent events that a query depends on, where that is not all of them


@pytest.fixture(params=sorted(REGISTRY))
def architecture(request):
    """Every architecture: its name and class."""
    return request.param, REGISTRY[request.param]


def trained(*objectives: str) -> list[tuple[str, str]]:
    """Every (architecture, objective) that can be trained, of these `objectives`."""
    return [(name, o) for name in sorted(REGISTRY) for o in objectives if o in REGISTRY[name].objectives]


def has_option(architecture: str, name: str) -> bool:
    return name in {field.name for field in fields(REGISTRY[architecture].Options)}


def make_model(architecture: str, *, num_items: int = 30, num_users: int = 8, length: int = 12, **options):
    cls = REGISTRY[architecture]
    shared = {"d_model": 16, "length": length}
    small = {name: value for name, value in shared.items() if has_option(architecture, name)}
    options = small | SMALL.get(architecture, {}) | options
    tokens = make_tokens(num_items) if "text" in cls.needs else None
    model = cls(cls.Options(**options), Catalogue(num_items, num_users, length, tokens))
    if architecture == "recformer":  # untrained, all its items are all but the same
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.refresh()
    return model


def make_tokens(num_items: int) -> dict[str, torch.Tensor]:
    """Tokens and text vectors of a catalogue: item i has a name and 1 to 3 values, none of them another item's."""
    sizes = 2 + torch.arange(num_items) % 3
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (2, 0))
    first = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    first[offsets[1:-1]] = True
    ids = torch.where(first, 4, torch.arange(len(first)) + 5)
    return {
        "ids": ids.int(),
        "types": torch.where(first, 1, 2).to(torch.int8),
        "starts": torch.ones_like(first),
        "offsets": offsets,
        "special": torch.tensor([0, 2, 3, len(first) + 5]),
        "vectors": torch.nn.functional.normalize(torch.randn(num_items + 1, 24), dim=-1),
    }


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
