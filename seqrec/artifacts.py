"""Names and schemas of the files that stages exchange; no other module defines file names."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError

from seqrec.errors import RetryableError

ROOT = Path(__file__).parent.parent  # where models, seqrec and params.yaml lie

# ingest -> validate, prepare
INTERACTIONS = "interactions.parquet"
MAX_ID_LENGTH = 256  # characters of a user or item
ITEMS = "items.parquet"
QUARANTINE = "quarantine.parquet"
SOURCE_CARD = "source.json"
# prepare -> everything after it
SEQUENCES = "sequences.arrow"
VOCABULARY = "vocabulary.parquet"
USERS = "users.parquet"
SPLIT_CARD = "split.json"
NEGATIVES = "negatives.arrow"
# pretrain -> finetune -> evaluate
WEIGHTS = "best.safetensors"
MODEL_CARD = "config.json"
EPOCH_RECORDS = "history.jsonl"
COUNTS = "counts.safetensors"  # count term of the scores, if any
TOKENS = "tokens.safetensors"  # text models: tokens of the items
TOKENIZER = "tokenizer.json"  # text models: the tokeniser
GRAPH = "model.onnx"  # beside the weights, if the model was exported; `serve` runs it
GRAPH_CARD = "model.onnx.json"
LEFT_OUT = "left-out.txt"  # in the place of a baseline that the data or the settings do not allow: the reason
MODEL_PREFIX = "seqrec-"  # of the names of registered models, which a dataset follows
REFITTED = "refitted"  # folder of the weights of a refit, in the folder of the training it repeats
REFIT = "refit"  # key in the card of a refit: the evaluated training and its epochs
# evaluate -> register
METRICS = "metrics.json"
CASES = "cases.parquet"
RECOMMENDATIONS = "recommendations.parquet"
# register
CHANGES = "SEQREC_CHANGES"  # environment variable: settings changed for one run, as JSON
REPORT_PAGE = "index.html"
VALIDATION = "validation.json"  # of the data, beside the reports

FACTS = (  # keys of cards that identify the content of a folder
    *("source", "licence", "dataset", "protocol", "input_sha256", "split_sha256"),
    *("model", "architecture", "stage", "parameters", "fingerprint", "weights_sha256"),
)

STAGE = (  # the stage that writes a file, for the message about a damaged or missing one
    dict.fromkeys((INTERACTIONS, ITEMS, QUARANTINE, SOURCE_CARD), "ingest")
    | dict.fromkeys((SEQUENCES, NEGATIVES, SPLIT_CARD), "prepare")
    | dict.fromkeys((VOCABULARY, USERS), "prepare, or the training that wrote it,")
    | dict.fromkeys((WEIGHTS, MODEL_CARD, EPOCH_RECORDS, COUNTS, TOKENS, TOKENIZER), "pretrain, finetune or baselines")
    | dict.fromkeys((GRAPH, GRAPH_CARD), "export")
    | dict.fromkeys((METRICS, CASES, RECOMMENDATIONS), "evaluate, or baselines,")
    | {VALIDATION: "validate"}
)


def _schema(**columns: pa.DataType) -> pa.Schema:
    """Return a schema of columns without missing values."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


INTERACTIONS_SCHEMA = _schema(
    user_id=pa.string(),
    item_id=pa.string(),
    timestamp=pa.int64(),  # seconds, UTC
    row=pa.int64(),  # position in the source: the tie-breaker of equal times
).append(pa.field("rating", pa.float32()))  # null if the source has none
ITEMS_SCHEMA = _schema(item_id=pa.string()).append(pa.field("title", pa.string()))  # attributes, strings, may follow
QUARANTINE_SCHEMA = _schema(
    file=pa.string(),
    line=pa.int64(),  # 1-based
    reason=pa.string(),
    text=pa.string(),  # the first 500 characters of the line
)
SEQUENCES_SCHEMA = _schema(
    user=pa.int32(),
    items=pa.list_(pa.int32()),
    times=pa.list_(pa.int64()),
    train_end=pa.int32(),
    valid_end=pa.int32(),
)
NEGATIVES_SCHEMA = _schema(negatives=pa.list_(pa.int32(), 100))  # a row per user for protocol LOO-101, none for others
VOCABULARY_SCHEMA = _schema(
    item=pa.int32(),  # 1..N; 0 is padding and has no row
    item_id=pa.string(),
    count=pa.int64(),  # training events; 0 = cold
)
MODEL_VOCABULARY_SCHEMA = VOCABULARY_SCHEMA.append(pa.field("title", pa.string()))  # the copy saved with a model
USERS_SCHEMA = _schema(user=pa.int32(), user_id=pa.string())
CASES_SCHEMA = _schema(
    split=pa.string(),  # valid | test
    user=pa.int32(),
    position=pa.int32(),  # index of the target in the user's sequence
    target=pa.int32(),
    rank=pa.float64(),  # 1-based mid-rank, configured filter_seen
    ties=pa.int32(),  # other candidates with the target's score
)
RECOMMENDATIONS_SCHEMA = _schema(user=pa.int32(), rank=pa.int32(), item=pa.int32(), score=pa.float32())


def inputs_of(sequences: Path, sources: Iterable[str]) -> list[Path]:
    """Return the files that a model of the prepared dataset and its `sources` depends on: split cards and items."""
    tables = [sequences.parent, *(sequences.parent / "sources" / name for name in sources)]
    return [path for table in tables for path in (table / ITEMS, table / "sequences" / SPLIT_CARD) if path.is_file()]


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


UNREADABLE = (  # what readers raise, those of JSON with an unexpected shape among them
    *(ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError),
    *(pa.ArrowException, SafetensorError),
)


class DamagedError(RetryableError):
    """A file is cut short or altered; the message says which one, and what writes it again."""


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turn the error of a reader that finds `path` cut short or altered into a `DamagedError`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, but must be a file")
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, FileNotFoundError):
            stage = STAGE.get(path.name)
            raise FileNotFoundError(f"{path} not found" + (f": run {stage} first" if stage else "")) from error
        if isinstance(error, OSError) and error.errno is not None:  # the file system's error
            error.filename = str(path)
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "not a parquet file" in reason and path.suffix != ".parquet":  # such as the source's own CSV file
            raise ValueError(
                f"{path} is not a Parquet file: name one that `ingest` wrote, such as data/{ITEMS} or "
                f"data/{INTERACTIONS}"
            ) from error
        raise DamagedError(f"{path} is damaged ({reason:.200}): {remedy(path)}") from error


def explained(error: Exception) -> str:
    """Return the message of an error, in words where a path or a package is missing, or a folder is a file."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; docs/library.md lists the extras of seqrec, and what needs them"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{error.filename} not found"
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:
        path = Path(error.filename)
        for file in (one for one in (path, *path.parents) if one.is_file()):
            return f"{file} is a file, but must be a folder"
    return str(error)


def remedy(path: Path) -> str:
    """Return what to do about a damaged file."""
    stage = STAGE.get(path.name)
    return f"run {stage} again" if stage else "restore it, or remove it and repeat the command that wrote it"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        DamagedError: it holds none.
    """
    with whole(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    return content


def open_table(path: Path) -> pq.ParquetFile:
    """Return the Parquet file `path`, of which only the metadata is read.

    Raises:
        DamagedError: it is not complete.
    """
    with whole(path):
        return pq.ParquetFile(path)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in the Parquet file `path`, or some of its columns; unlike pyarrow's, it imports no pandas.

    Raises:
        DamagedError: the file is not complete, or lacks a column.
    """
    with whole(path), pq.ParquetFile(path) as file:
        if missing := set(columns or ()) - set(file.schema_arrow.names):
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        return file.read(columns=columns)


def map_ipc(path: Path) -> pa.Table:
    """Return the table in the Arrow IPC file `path`, mapped into memory.

    Raises:
        DamagedError: it is not complete.
    """
    with whole(path):
        if not path.stat().st_size:
            raise ValueError("it is empty")
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def facts(*folders: str | Path) -> dict[str, str | float]:
    """Return hashes, counts and names in the cards of `folders` as a flat mapping; later folders take precedence."""
    found: dict[str, str | float] = {}
    for folder in map(Path, folders):
        for card in (SOURCE_CARD, SPLIT_CARD, MODEL_CARD):
            if (folder / card).is_file():
                content = read_json(folder / card)
                counts = content.get("counts", {}) if card != MODEL_CARD else {}  # there, of the count term
                flat = {**content, **{f"count_{name}": value for name, value in counts.items()}}
                found |= {key: flat[key] for key in flat if key.startswith("count_") or key in FACTS}
        if (folder / INTERACTIONS).is_file():
            found["interactions_sha256"] = sha256(folder / INTERACTIONS)
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield the name to write a file under; when the block ends without an error, the file is complete and gets `path`.

    A killed process, and a power cut, leave the old file or the new one, whole.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, but must be a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    rename(partial, path)


def rename(partial: Path, path: Path) -> None:
    """Give a file or folder its name, after its content is on the disk; the name is there too when this returns."""
    sync(partial)
    partial.replace(path)
    _sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk."""
    for inner in path.rglob("*") if path.is_dir() else ():
        _sync(inner)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without this operation, as some have for folders
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, content: str) -> None:
    """Write `content` to `path` atomically."""
    with written(path) as partial:
        partial.write_text(content, encoding="utf-8")


def write_table(path: Path, table: pa.Table) -> None:
    """Write `table` as Parquet to `path` atomically."""
    with written(path) as partial:
        pq.write_table(table, partial, compression="zstd")


@contextmanager
def shard_writer(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
    """Yield a function that appends a table of one chunk, as a record batch, to an uncompressed Arrow IPC file.

    Readers can memory-map it. The file appears atomically when the block ends without an error.
    """
    with written(path) as partial, pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer.write_table


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that atomically replaces `folder` when the block ends without an error.

    A killed process, and a power cut, leave either the old or the new folder; the next call deletes its temporary
    files.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, but must be a folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
        sync(partial)
        _exchange(partial, folder)
        _sync(folder.parent)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        rename(partial, folder)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders atomically, or in three steps if the system does not support that."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if swap is not None and swap(here, os.fsencode(new), here, os.fsencode(old), ctypes.c_uint(exchange)) == 0:
        return
    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.replace(aside)
    new.replace(old)
    aside.replace(new)
