"""Checkpoints: the folders of saved models, which hold weights, a card, the catalogue and further files.

The card (config.json) lists every other file with its SHA-256. Weights are safetensors and never pickles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from seqrec.artifacts import (
    COUNTS,
    EPOCH_RECORDS,
    MODEL_CARD,
    MODEL_VOCABULARY_SCHEMA,
    TOKENIZER,
    TOKENS,
    USERS,
    VOCABULARY,
    WEIGHTS,
    DamagedError,
    read_json,
    read_table,
    remedy,
    sha256,
    whole,
    write_json,
    written,
)
from seqrec.config import ConfigError, CountsConfig, ModelConfig, Section, parse
from seqrec.config.ranges import Bounds, Count, NotNegative
from seqrec.counts.term import CountTerm
from seqrec.data.sequences import counts_of
from seqrec.models import REGISTRY, UNTRAINED, architecture_of, name_of
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.models.ensemble import create
from seqrec.training.tensors import load_tensors, not_finite, save_tensors

FILES = (VOCABULARY, USERS, TOKENIZER)  # files that a card may list besides weights and tokens
DAY = 86_400.0
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
    model: str = "model"
    stage: str = "finetune"
    fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    seconds: NotNegative = 0.0
    filter_seen: bool = False
    median_gap: NotNegative = DAY


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved model, whose files `load_checkpoint` has read and compared with its card."""

    folder: Path
    card: dict[str, Any]
    model: SequenceModel  # in eval mode, on the CPU
    count_term: CountTerm | None
    files: dict[str, bytes]  # the content of FILES

    @cached_property
    def vocabulary(self) -> pa.Table:
        """The items, see MODEL_VOCABULARY_SCHEMA."""
        return pq.ParquetFile(pa.BufferReader(self.files[VOCABULARY])).read()

    @property
    def item_ids(self) -> list[str]:
        """The ids of items 1, 2, ..."""
        return self.vocabulary["item_id"].to_pylist()  # type: ignore[no-any-return]

    @property
    def item_counts(self) -> Tensor:
        """The training events (V,) of each item; entry 0 is padding."""
        return counts_of(self.vocabulary)

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the items by item id; items without a title are left out."""
        pairs = zip(self.item_ids, self.vocabulary["title"].to_pylist(), strict=True)
        return {item_id: title for item_id, title in pairs if title}

    @cached_property
    def users(self) -> pa.Table:
        """The users, see USERS_SCHEMA."""
        return pq.ParquetFile(pa.BufferReader(self.files[USERS])).read()

    def epoch_records(self) -> list[dict[str, Any]]:
        """Return the record of each epoch of the training that led to the checkpoint.

        Raises:
            DamagedError: the file is missing, or not the one that the card lists.
        """
        path = self.folder / EPOCH_RECORDS
        if "history_sha256" in self.card:  # older cards have none
            _check_digest(path, self.card["history_sha256"])
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


def build(config: ModelConfig, catalogue: Catalogue) -> SequenceModel:
    """Return a newly initialised model; the values are drawn from torch's global generator.

    Raises:
        ConfigError: unknown architecture or option, or a value out of range.
    """
    if config.architecture not in REGISTRY and config.architecture not in UNTRAINED:
        known = ", ".join(REGISTRY)
        raise ConfigError(
            f"models.*.architecture: {config.architecture!r} is not one of {known}; "
            "seqrec.models.register(NAME, CLASS) adds your own"
        )
    architecture = architecture_of(config.architecture)
    options = parse(architecture.Options, config.options, f"models.{config.architecture}.options")
    try:
        return create(architecture, options, catalogue._replace(length=options.length))
    except ValueError as error:
        raise ConfigError(f"models.{config.architecture}.options: {error}") from error


def save_model(directory: Path, model: SequenceModel, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write the weights of `model`, its card, its tokens if it has any, and `files`.

    Args:
        directory: output folder, which `load_checkpoint` reads.
        model: the model to save.
        facts: further entries of the card, see `Card`.
        files: vocabulary, users, tokeniser by file name; the card lists their hashes.

    Raises:
        ValueError: a weight is not finite.
    """
    if bad := not_finite(model.state_dict()):
        raise ValueError(
            f"{directory / WEIGHTS}: NaN or infinity in {', '.join(bad)}: train again with a smaller learning_rate"
        )
    directory.mkdir(parents=True, exist_ok=True)
    card = {**facts} | {
        "architecture": name_of(model.architecture),
        "options": asdict(model.options),
        "catalogue": {key: value for key, value in model.catalogue._asdict().items() if key != "tokens"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {"torch": torch.__version__},
        "files": write_files(directory, files),
    }
    save_tensors(directory / WEIGHTS, {name: value.detach() for name, value in model.state_dict().items()})
    card.pop("tokens_sha256", None)
    if model.catalogue.tokens is not None:
        save_tensors(directory / TOKENS, model.catalogue.tokens)
        card["tokens_sha256"] = sha256(directory / TOKENS)
    write_json(directory / MODEL_CARD, card | {"weights_sha256": sha256(directory / WEIGHTS)})


def write_files(directory: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Write the files of a model, each of them atomically; return their hashes."""
    for name, content in files.items():
        with written(directory / name) as partial:
            partial.write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def load_checkpoint(folder: Path) -> Checkpoint:
    """Return the model saved in `folder` with all that belongs to it, after comparing each file with the card.

    Raises:
        FileNotFoundError: there is no card.
        DamagedError: a file is missing, or is not the one that the card lists.
        ValueError: this version cannot build the model.
    """
    card = _read_card(folder)
    tokens = None
    if "tokens_sha256" in card:
        tokens = _load_tensors(folder / TOKENS, card["tokens_sha256"])
    weights = _load_tensors(folder / WEIGHTS, card["weights_sha256"])
    config = ModelConfig(architecture=card["architecture"], options=card["options"])
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten; keep the caller's random state
        try:
            model = build(config, Catalogue(**card["catalogue"], tokens=tokens))
        except ConfigError as error:
            raise ValueError(f"{folder / MODEL_CARD}: {error}") from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit {config.architecture} in this version of seqrec: train the model "
            f"again, or use the version that trained it ({error})"
        ) from error
    for name, digest in card["files"].items():
        _check_digest(folder / name, digest)
    return Checkpoint(
        folder=folder,
        card=card,
        model=model.eval(),
        count_term=_load_counts(folder, card),
        files={name: (folder / name).read_bytes() for name in card["files"]},
    )


def _read_card(folder: Path) -> dict[str, Any]:
    """Return the card in `folder`, with the defaults of `Card`."""
    path = folder / MODEL_CARD
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


def _load_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    _check_digest(path, digest)
    return load_tensors(path)


def _check_digest(path: Path, digest: str) -> None:
    """Raise DamagedError if a file is missing or its SHA-256 is not the one in the card."""
    if not path.is_file():
        raise DamagedError(f"{path} is missing, although {MODEL_CARD} beside it names it: {remedy(path)}")
    if sha256(path) != digest:
        raise DamagedError(
            f"{path} differs from the file that {MODEL_CARD} describes: refusing to load it; {remedy(path)}"
        )


def save_counts(directory: Path, counts: CountTerm | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Write the count term of the model in `directory`; return the entry `counts` of its card.

    Args:
        directory: folder of the model; the count term of an earlier training is removed from it.
        counts: the count term; None if the model has none.
        chosen: its settings, as in CountsConfig, and further entries for the card.
    """
    (directory / COUNTS).unlink(missing_ok=True)
    if counts is None:
        return dict(chosen)
    save_tensors(directory / COUNTS, counts.tensors())
    return {**chosen, "pairs": len(counts.targets), "sha256": sha256(directory / COUNTS)}


def _load_counts(folder: Path, card: Mapping[str, Any]) -> CountTerm | None:
    """Return the count term of the model in `folder`, or None if its card lists none."""
    chosen = card["counts"]
    if "sha256" not in chosen:
        return None
    tensors = _load_tensors(folder / COUNTS, chosen["sha256"])
    try:
        return CountTerm.stored(tensors, counts_config(chosen))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / MODEL_CARD}: {error}") from error


def counts_config(chosen: Mapping[str, Any]) -> CountsConfig:
    """Return the settings of a count term from the entry `counts` of a card.

    Raises:
        ConfigError: a value is missing or wrong; the message names it.
    """
    older = {"values": "log", "decay": "", "ease": 0.0, "ease_decay": 1.0, "ease_events": 200}  # cards without them
    named = older | dict(chosen)
    return parse(CountsConfig, {field.name: named.get(field.name) for field in fields(CountsConfig)}, "counts")


def catalogue_files(sequences: Path, items: Path | None = None) -> dict[str, bytes]:
    """Return the tables to save with a model of the prepared dataset in `sequences`, by file name.

    Args:
        sequences: folder with vocabulary and users.
        items: the items table, source of the titles in the vocabulary; titles it does not have are null.
    """
    vocabulary = read_table(sequences / VOCABULARY)
    titles = pa.nulls(len(vocabulary), pa.string())
    if items is not None and items.is_file():
        known = read_table(items, ["item_id", "title"])
        row = pc.index_in(vocabulary["item_id"], value_set=known["item_id"].combine_chunks())
        titles = known["title"].take(row)
    return {
        VOCABULARY: _parquet(vocabulary.append_column(MODEL_VOCABULARY_SCHEMA.field("title"), titles)),
        USERS: (sequences / USERS).read_bytes(),
    }


def with_counts(vocabulary: pa.Table, counts: pa.Array) -> bytes:
    """Return the file of a model's vocabulary with its counts replaced by `counts`, of items 1, 2, ..."""
    column = vocabulary.column_names.index("count")
    return _parquet(vocabulary.set_column(column, vocabulary.schema.field(column), counts.cast(pa.int64())))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(MODEL_VOCABULARY_SCHEMA), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
