"""Checkpoints: the folders of saved models, which hold weights, a card, the catalogue and further files.

The card (config.json) lists every other file with its SHA-256. Weights are safetensors and never pickles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from seqrec.artifacts import (
    COUNTS,
    MODEL_CARD,
    MODEL_VOCABULARY_SCHEMA,
    TOKENS,
    USERS,
    VOCABULARY,
    WEIGHTS,
    read_table,
    sha256,
    write_json,
    written,
)
from seqrec.config import ConfigError, CountsConfig, ModelConfig, parse
from seqrec.counts.term import CountTerm
from seqrec.models import REGISTRY, UNTRAINED, architecture_of, name_of
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.models.ensemble import create
from seqrec.training.saved import Saved, check_digest, read
from seqrec.training.tensors import load_tensors, not_finite, save_tensors


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Saved):
    """A saved model, whose files `load_checkpoint` has read and compared with its card."""

    model: SequenceModel  # in eval mode, on the CPU
    count_term: CountTerm | None


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
    """Write the weights of `model`, its card with the further entries `facts`, its tokens if it has any, and `files`.

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
    saved, tokens = read(folder), None
    card = saved.card
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
    return Checkpoint(**vars(saved), model=model.eval(), count_term=_load_counts(folder, card))


def _load_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    check_digest(path, digest)
    return load_tensors(path)


def save_counts(directory: Path, counts: CountTerm | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Write the count term of the model in `directory`, if it has one; return the entry `counts` of its card.

    `chosen` are its settings, as in CountsConfig, and further entries for the card.
    """
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
    """Return the settings of a count term from the entry `counts` of a card; the first cards had no `across`.

    Raises:
        ConfigError: a value is missing or wrong; the message names it.
    """
    values = {field.name: chosen.get(field.name) for field in fields(CountsConfig)}
    return parse(CountsConfig, values | {"across": chosen.get("across", 1.0)}, "counts")


def catalogue_files(sequences: Path, items: Path | None = None) -> dict[str, bytes]:
    """Return the tables to save with a model of the prepared dataset in `sequences`, by file name.

    The titles in the vocabulary are those of the table `items`; titles it does not have are null.
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


def recounted(vocabulary: pa.Table, count: Tensor) -> bytes:
    """Return the file of a model's vocabulary with its counts replaced by `count`, of items 0 (padding), 1, ..."""
    column = vocabulary.column_names.index("count")
    counts = pa.array(count[1:].numpy(), pa.int64())
    return _parquet(vocabulary.set_column(column, vocabulary.schema.field(column), counts))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(MODEL_VOCABULARY_SCHEMA), sink, compression="zstd")
    return sink.getvalue().to_pybytes()
