"""What the folder of a saved model holds besides weights, read without torch: card, vocabulary, users, tokeniser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from seqrec.artifacts import (
    EPOCH_RECORDS,
    MODEL_CARD,
    TOKENIZER,
    USERS,
    VOCABULARY,
    DamagedError,
    read_json,
    read_table,
    remedy,
    sha256,
    whole,
)
from seqrec.config import ConfigError, Section, parse
from seqrec.config.ranges import Bounds, Count, NotNegative

FILES = (VOCABULARY, USERS, TOKENIZER)  # files that a card may list besides weights and tokens
Number = Annotated[int, Bounds(ge=1, lt=2**31 - 1)]  # of items: int32, with one number more for padding


@dataclass(frozen=True, kw_only=True)
class Sizes(Section):
    """The entry `catalogue` of a card."""

    num_items: Number
    num_users: Annotated[int, Bounds(ge=0, lt=2**31 - 1)]
    length: Count


@dataclass(frozen=True, kw_only=True)
class Card(Section):
    """The entries of every card; a card may have more."""

    architecture: str
    options: dict[str, Any]
    catalogue: dict[str, Any]
    parameters: Count
    files: dict[str, str]  # SHA-256 by name
    weights_sha256: str
    model: str
    fingerprint: str
    seconds: NotNegative
    filter_seen: bool
    median_gap: NotNegative  # seconds
    stage: str = "finetune"
    config: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a saved model holds besides weights; `read` has compared the files with the card."""

    folder: Path
    card: dict[str, Any]
    files: dict[str, bytes]  # the content of FILES

    @cached_property
    def vocabulary(self) -> pa.Table:
        """The items, see MODEL_VOCABULARY_SCHEMA."""
        return self._table(VOCABULARY)

    @property
    def item_ids(self) -> list[str]:
        """The ids of items 1, 2, ..."""
        return self.vocabulary["item_id"].to_pylist()

    @property
    def item_counts(self) -> NDArray[np.int64]:
        """The training events (V,) of each item; entry 0 is padding."""
        return np.pad(np.from_dlpack(self.vocabulary["count"].combine_chunks()), (1, 0))

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the items by item id; items without a title are left out."""
        pairs = zip(self.item_ids, self.vocabulary["title"].to_pylist(), strict=True)
        return {item_id: title for item_id, title in pairs if title}

    @cached_property
    def users(self) -> pa.Table:
        """The users, see USERS_SCHEMA."""
        return self._table(USERS)

    def _table(self, name: str) -> pa.Table:
        """Read a table without threads: one that frees Python's bytes while Python ends would abort the process."""
        return pq.ParquetFile(pa.BufferReader(self.files[name])).read(use_threads=False)

    def epoch_records(self) -> list[dict[str, Any]]:
        """Return the record of each epoch of the training that led to the checkpoint.

        Raises:
            DamagedError: the file is missing, or not the one that the card lists.
        """
        path = self.folder / EPOCH_RECORDS
        check_digest(path, self.card["history_sha256"])
        with whole(path):
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def check_catalogue(self, sequences: Path, *, users: bool) -> None:
        """Check that the model numbers the items as a prepared dataset does, and with `users` also the users.

        Raises:
            ValueError: the model was trained on another catalogue.
        """
        tables = ((VOCABULARY, self.vocabulary, "item_id"), (USERS, self.users, "user_id"))
        for name, table, column in tables[: 1 + users]:
            ours, theirs = table[column], read_table(sequences / name, [column])[column]
            if not ours.equals(theirs):
                what = f"{len(ours)} against {len(theirs)} {column}s"
                if len(ours) == len(theirs):
                    what = f"the {column}s differ, or their order does"
                raise ValueError(
                    f"{self.folder} was not trained on the catalogue in {sequences} ({name}: {what}): train the "
                    "model again on this catalogue, or name the prepared data that it was trained on"
                )


def read(folder: Path) -> Saved:
    """Return what is saved in `folder` besides weights, after comparing each of these files with the card.

    Raises:
        FileNotFoundError: there is no card.
        DamagedError: a file is missing, or is not the one that the card lists.
        ValueError: an older version wrote the card.
    """
    card = _read_card(folder)
    for name, digest in card["files"].items():
        check_digest(folder / name, digest)
    return Saved(folder=folder, card=card, files={name: (folder / name).read_bytes() for name in card["files"]})


def models_of_run(folder: Path) -> str:
    """Return the folders of the models in the output of a run, or in a part of it, separated by commas."""
    parts = ("artifacts/*/finetuned", "*/finetuned", "finetuned")
    found = {card.parent for part in parts for card in folder.glob(f"{part}/{MODEL_CARD}")}
    return ", ".join(map(str, sorted(found)))


def _read_card(folder: Path) -> dict[str, Any]:
    """Return the card in `folder`, with the defaults of `Card`."""
    path = folder / MODEL_CARD
    if not path.is_file() and (found := models_of_run(folder)):
        raise FileNotFoundError(f"{folder} holds no model: name one of {found}")
    content = read_json(path)
    files = content.get("files")
    if not isinstance(files, dict) or not {VOCABULARY, USERS} <= files.keys() <= {*FILES}:
        raise ValueError(
            f"{path} was written by an older version of seqrec and names no vocabulary and users: "
            "train the model again, and register it again"
        )
    try:
        card = parse(Card, {entry.name: content[entry.name] for entry in fields(Card) if entry.name in content}, "")
        parse(Sizes, card.catalogue, "catalogue")
    except ConfigError as error:
        raise ValueError(f"{path}: {error}") from error
    return content | vars(card)


def check_digest(path: Path, digest: str) -> None:
    """Raise DamagedError if a file is missing or its SHA-256 is not the one in the card."""
    if not path.is_file():
        raise DamagedError(f"{path} is missing, although {MODEL_CARD} beside it names it: {remedy(path)}")
    if sha256(path) != digest:
        raise DamagedError(
            f"{path} differs from the file that {MODEL_CARD} describes: refusing to load it; {remedy(path)}"
        )
