"""The files of a saved model besides its weights, and the checks before a model is built from them.

The card (config.json) lists every other file with its SHA-256. Nothing in the folder is trusted: sizes in the card, the
files and the header of the weights are checked before they decide how much memory or time is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import safe_open

from seqrec.artifacts import (
    EPOCH_RECORDS,
    MODEL_CARD,
    MODEL_VOCABULARY_SCHEMA,
    SPLIT_CARD,
    TOKENIZER,
    TOKENS,
    USERS,
    USERS_SCHEMA,
    VOCABULARY,
    WEIGHTS,
    DamagedError,
    open_table,
    read_json,
    read_table,
    remedy,
    sha256,
    whole,
    written,
)

LARGEST = 1 << 20  # bytes: the largest card
MOST = 2**31 - 2  # items or users: int32, with one number more for padding or the unknown user
ENDLESS = 1e15  # seconds: no duration is as long
DAY = 86_400.0
FILES = (VOCABULARY, USERS, TOKENIZER)  # files that a card may list besides weights and tokens
DIGEST = re.compile("[0-9a-f]{64}")
FACTS: dict[str, Any] = {  # entries of every card, with the defaults of `save_model`
    "model": "model",
    "stage": "finetune",
    "fingerprint": "",
    "config": {},
    "seconds": 0.0,
    "filter_seen": False,
    "median_gap": DAY,
}
FILTERS = ("deduplicate", "k_core", "min_rating", "require_title")  # of a split card: what decides which events remain
SPLIT = ("protocol", "val_users", "valid_cut", "split_sha256", *FILTERS)  # of a split card: where training events end
KINDS: dict[str, type] = {name: type(value) for name, value in FACTS.items()} | {
    "architecture": str,
    "options": dict,
    "catalogue": dict,
    "parameters": int,
    "files": dict,
    "weights_sha256": str,
}
SIZES = {"num_items": 1, "num_users": 0, "length": 0}  # sizes of a catalogue and their minimum
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> type and shape


def split_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card of a model says of the split that it was trained on.

    Args:
        card: the split card of the prepared dataset.
    """
    return {name: card[name] for name in SPLIT if name in card}


def held_out_now(model: Path, card: Mapping[str, Any], data: Path) -> str:
    """Return why an event that trained a model may be a validation or test event now; empty if none can be.

    The log may have grown since, but none of the users that remain may have lost an event.

    Args:
        model: folder of the model, with its vocabulary.
        card: card of the model.
        data: folder of the prepared dataset of now.
    """
    before, now = card.get("split", {}), read_json(data / SPLIT_CARD)
    if not {"protocol", "val_users", "split_sha256"} <= before.keys():
        return "its model card does not name the split that it was trained on"
    if before["split_sha256"] == now["split_sha256"]:
        return ""
    protocols = [split["protocol"].replace("LOO-101", "LOO-full") for split in (before, now)]
    if protocols[0] != protocols[1]:
        return f"it was trained under prepare.protocol {before['protocol']}, and the dataset has {now['protocol']}"
    if protocols[0] == "temporal":
        if now["valid_cut"] < before.get("valid_cut", math.inf):
            return "its training events end after the validation events of the dataset begin"
        return ""
    if protocols[0] == "RATIO-full" or before["val_users"]:
        return "under RATIO-full or prepare.val_users, training events may become validation events when a log grows"
    changed = [name for name in FILTERS if before.get(name) != now.get(name)]
    if changed:
        return f"other filters than its card names ({', '.join(changed)}) may hold out what it was trained on"
    if now["k_core"]["user"] < 3:
        return f"under {now['protocol']}, the second event of a user trains until there is a third: min_user_events < 3"
    items, still = (pq.read_table(folder / VOCABULARY, columns=["item_id"])["item_id"] for folder in (model, data))
    gone = len(items) - pc.sum(pc.is_in(items, value_set=still.combine_chunks())).as_py()
    if gone:
        return f"{gone} of its items are gone, and under {now['protocol']} events before theirs are held out instead"
    return ""


def read(directory: Path) -> dict[str, Any]:
    """Return the card in `directory`, after checking type and range of every key.

    Raises:
        FileNotFoundError: there is no card.
        ValueError: the file is not a card, or was written by a version whose cards listed no vocabulary.
    """
    path = directory / MODEL_CARD
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    with whole(path):
        card = json.loads(content) if len(content) <= LARGEST else None
    if not isinstance(card, dict):
        raise ValueError(f"{path} is not a model card: expected a JSON object of at most {LARGEST} bytes")
    if "weights_sha256" in card and "files" not in card:
        raise ValueError(
            f"{path} was written by an older version and does not say which vocabulary and users belong to the "
            "weights: train the model again, and register it again"
        )
    for key, kind in KINDS.items():
        _check(path, key, card.get(key), kind)
    for key, least in SIZES.items():
        size = card["catalogue"].get(key)
        if type(size) is not int or not least <= size <= MOST:
            raise ValueError(f"{path}: catalogue.{key} is {size!r:.80}, expected an integer from {least} to {MOST}")
    if set(card["catalogue"]) != set(SIZES) or not set(card["files"]) <= set(FILES):
        raise ValueError(f"{path}: unknown entries in catalogue or files")
    counts = card.get("counts", {})
    _check(path, "counts", counts, dict)
    _check(path, "counts.alpha", counts.get("alpha", 0.0), float)
    _check(path, "counts.folds", counts.get("folds", []), list)
    for fold in counts.get("folds", []):
        _check(path, "counts.folds", fold, dict)
    digests = {"weights_sha256": card["weights_sha256"], "tokens_sha256": card.get("tokens_sha256", "0" * 64)}
    digests |= {"counts.sha256": counts.get("sha256", "0" * 64), "history_sha256": card.get("history_sha256", "0" * 64)}
    for key, value in {**digests, **card["files"]}.items():
        if not isinstance(value, str) or not DIGEST.fullmatch(value):
            raise ValueError(f"{path}: {key} is {value!r:.80}, expected a SHA-256")
    return card


def _check(path: Path, key: str, value: Any, kind: type) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        good = number and 0 <= value < ENDLESS  # false for NaN
    elif kind is int:
        good = type(value) is int and 0 <= value < 2**63
    else:
        good = isinstance(value, kind)
    if not good:
        raise ValueError(f"{path}: {key} is {value!r:.80}, expected a {kind.__name__}")


def verify(directory: Path, card: Mapping[str, Any]) -> None:
    """Check every file that `card` lists against its hash, and the sizes of the tables against the catalogue.

    Raises:
        ValueError: a file is missing, or its contents are not those that the card lists.
    """
    named = {WEIGHTS: card["weights_sha256"], **card["files"]}
    named |= {TOKENS: card["tokens_sha256"]} if "tokens_sha256" in card else {}
    for name, digest in named.items():
        check_file(directory / name, digest)
    for name, schema, size in (
        (VOCABULARY, MODEL_VOCABULARY_SCHEMA, "num_items"),
        (USERS, USERS_SCHEMA, "num_users"),
    ):
        if name in card["files"]:
            file = open_table(directory / name)
            if not file.schema_arrow.equals(schema) or file.metadata.num_rows != card["catalogue"][size]:
                raise ValueError(f"{directory / name} does not hold the catalogue of {MODEL_CARD}: {size} differs")


def check_file(path: Path, digest: str) -> None:
    """Raise ValueError if a file is missing or its SHA-256 is not the one in the card."""
    if not path.is_file():
        raise DamagedError(f"{path} is missing: {MODEL_CARD} beside it names it; {remedy(path)}")
    if sha256(path) != digest:
        raise DamagedError(
            f"{path} differs from the file that {MODEL_CARD} describes: refusing to load it; {remedy(path)}"
        )


def tensors(path: Path) -> Tensors:
    """Return types and shapes of the tensors in a safetensors file; only its header is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, or it is truncated.
    """
    with whole(path), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it has no __iter__)
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


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


def with_counts(vocabulary: bytes, counts: pa.Array) -> bytes:
    """Return a model's vocabulary with its counts replaced by `counts`, of items 1, 2, ..."""
    table = pq.read_table(pa.BufferReader(vocabulary))
    column = table.column_names.index("count")
    return _parquet(table.set_column(column, table.schema.field(column), counts.cast(pa.int64())))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(MODEL_VOCABULARY_SCHEMA), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_titles(directory: Path) -> dict[str, str]:
    """Return the titles of a model's items by item id; items without a title are left out."""
    if not (directory / VOCABULARY).is_file():
        return {}
    columns = read_table(directory / VOCABULARY, ["item_id", "title"]).to_pydict()
    return {item_id: title for item_id, title in zip(columns["item_id"], columns["title"], strict=True) if title}


def read_files(directory: Path, card: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of the files that the card lists."""
    return {name: (directory / name).read_bytes() for name in card["files"]}


def write_files(directory: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Write the files of a model, each of them atomically; return their hashes."""
    for name, content in files.items():
        with written(directory / name) as partial:
            partial.write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def epoch_records(directory: Path, card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the record of each epoch of the training that led to `directory`.

    Raises:
        DamagedError: the file is missing, or not the one that the card lists.
    """
    path = directory / EPOCH_RECORDS
    if "history_sha256" in card:  # older cards have none
        check_file(path, card["history_sha256"])
    with whole(path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_complete(directory: Path, card: Mapping[str, Any]) -> None:
    """Raise ValueError if the model in `directory` was saved without its vocabulary or users."""
    missing = [name for name in (VOCABULARY, USERS) if name not in card["files"]]
    if missing:
        raise ValueError(f"{directory} was saved without {' and '.join(missing)}: train the model again")


def check_catalogue(directory: Path, card: Mapping[str, Any], sequences: Path, *, users: bool) -> None:
    """Check that a model numbers the items as a prepared dataset does, and with `users` also the users.

    Raises:
        ValueError: the model was trained on another catalogue.
    """
    check_complete(directory, card)
    for name, column in ((VOCABULARY, "item_id"), (USERS, "user_id"))[: 1 + users]:
        ours, theirs = (read_table(folder / name, [column])[column] for folder in (directory, sequences))
        if not ours.equals(theirs):
            what = f"{len(ours)} against {len(theirs)} {column}s"
            if len(ours) == len(theirs):
                what = f"the {column}s differ, or their order does"
            raise ValueError(
                f"{directory} was trained on another catalogue than {sequences} holds ({name}: {what}): train it "
                "again on this one, or name the prepared data that it was trained on"
            )
