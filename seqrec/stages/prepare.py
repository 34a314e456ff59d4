"""The prepare stage: interactions become numbered, ordered, split sequences."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl
import pyarrow as pa

from seqrec import artifacts
from seqrec.artifacts import read_json, sha256, write_ipc, write_json, write_table
from seqrec.config import PrepareConfig
from seqrec.data import splits

logger = logging.getLogger(__name__)
Frame = nw.DataFrame[Any]


def prepare(*, dataset: str, data: Path, validation: Path, sequences: Path, config: PrepareConfig) -> dict[str, float]:
    """Filter, number, order and split the interactions in `data`, and write the prepared dataset.

    Args:
        dataset: its key in `datasets`.
        data: folder of the ingested tables.
        validation: verdict of the validate stage on them.
        sequences: folder that receives sequences, vocabulary, users and split card.
        config: section `prepare`.

    Returns:
        The counts of the split card.

    Raises:
        ValueError: the tables did not pass validation, or the filters leave nothing to train on.
    """
    input_sha256 = sha256(data / artifacts.INTERACTIONS)
    verdict = read_json(validation)
    if not verdict["success"] or verdict["input_sha256"] != input_sha256:
        raise ValueError(f"{validation} is no successful validation of {data / artifacts.INTERACTIONS}")
    raw: Frame = nw.from_native(pl.read_parquet(data / artifacts.INTERACTIONS), eager_only=True)
    events, dropped = _filter(raw, data, config)
    events = splits.sample_users(events, config.sample_users, config.seed)
    if len(events) == 0:
        raise ValueError(
            f"no event is left of {len(raw)}: lower prepare.min_user_events ({config.min_user_events}), "
            f"prepare.min_item_events ({config.min_item_events}) or prepare.min_rating ({config.min_rating})"
        )
    users, items = splits.number(events, "user_id", "user"), splits.number(events, "item_id", "item")
    events = splits.order(events.join(users, on="user_id").join(items, on="item_id"))
    table, facts = splits.ends(events, config)
    events = splits.corrupt(events, table, len(items), config.noise_share, config.seed)
    counts = _write(sequences, events, table, users, items)
    _write_negatives(sequences, events, table, len(items), config)
    files = sorted(_FILES) + [artifacts.NEGATIVES] * (config.protocol == "LOO-101")
    split = hashlib.sha256("".join(sha256(sequences / name) for name in files).encode()).hexdigest()
    card = {
        "dataset": dataset,
        "protocol": config.protocol,
        **facts,
        "ties": "equal timestamps keep the order of the source rows",
        "deduplicate": config.deduplicate,
        "k_core": {"user": config.min_user_events, "item": config.min_item_events},
        "min_rating": config.min_rating,
        "require_title": config.require_title,
        "val_users": config.val_users,
        "sample_users": config.sample_users,
        "noise_share": config.noise_share,
        "seed": config.seed,
        "counts": counts,
        "dropped": dropped,
        "input_sha256": input_sha256,
        "split_sha256": split,
    }
    write_json(sequences / artifacts.SPLIT_CARD, card)
    logger.info("%s: %d users, %d items, %d events", dataset, counts["users"], counts["items"], counts["events"])
    return {name: float(value) for name, value in counts.items()}


_FILES = (artifacts.SEQUENCES, artifacts.VOCABULARY, artifacts.USERS)


def _filter(raw: Frame, data: Path, config: PrepareConfig) -> tuple[Frame, dict[str, int]]:
    """Apply the filters in their order and count what each one drops."""
    dropped = {}
    events = raw
    if config.min_rating > 0:
        events = events.filter(nw.col("rating") >= config.min_rating)
        dropped["events under min_rating"] = len(raw) - len(events)
    if config.require_title:
        items: Frame = nw.from_native(pl.read_parquet(data / artifacts.ITEMS), eager_only=True)
        titled = items.filter(nw.col("title").fill_null("").str.len_chars() > 0).select("item_id")
        before, events = len(events), events.join(titled, on="item_id", how="semi")
        dropped["events of items without title"] = before - len(events)
    before, events = len(events), splits.deduplicate(events, config.deduplicate)
    dropped["duplicate events"] = before - len(events)
    before, users, items_before = len(events), events["user_id"].n_unique(), events["item_id"].n_unique()
    events = splits.k_core(events, config.min_user_events, config.min_item_events)
    dropped["events outside the k-core"] = before - len(events)
    dropped["users outside the k-core"] = users - events["user_id"].n_unique()
    dropped["items outside the k-core"] = items_before - events["item_id"].n_unique()
    return events, dropped


def _write(sequences: Path, events: Frame, table: Frame, users: Frame, items: Frame) -> dict[str, int]:
    number = table["events"].to_numpy()
    offsets = np.concatenate([[0], np.cumsum(number)]).astype(np.int32)
    train_end, valid_end = (table[name].to_numpy().astype(np.int32) for name in ("train_end", "valid_end"))
    columns = [
        table["user"].to_numpy().astype(np.int32),
        pa.ListArray.from_arrays(offsets, events["item"].to_numpy().astype(np.int32)),
        pa.ListArray.from_arrays(offsets, events["timestamp"].to_numpy()),
        train_end,
        valid_end,
    ]
    write_ipc(sequences / artifacts.SEQUENCES, pa.table(columns, schema=artifacts.SEQUENCES_SCHEMA))

    position = np.arange(len(events)) - np.repeat(offsets[:-1], number)
    in_train = position < np.repeat(train_end, number)
    count = np.bincount(events["item"].to_numpy()[in_train], minlength=len(items) + 1)[1:]
    vocabulary = [items["item"].to_numpy(), items["item_id"].to_arrow(), count]
    write_table(sequences / artifacts.VOCABULARY, pa.table(vocabulary, schema=artifacts.VOCABULARY_SCHEMA))
    people = [users["user"].to_numpy(), users["user_id"].to_arrow()]
    write_table(sequences / artifacts.USERS, pa.table(people, schema=artifacts.USERS_SCHEMA))
    return {
        "users": len(users),
        "items": len(items),
        "events": len(events),
        "train": int(train_end.sum()),
        "valid": int((valid_end - train_end).sum()),
        "test": int((number - valid_end).sum()),
        "cold_items": int((count == 0).sum()),
        "users_without_cases": int(((number == valid_end) & (valid_end == train_end)).sum()),
        "tied_events": int(_tied(events)),
    }


def _write_negatives(sequences: Path, events: Frame, table: Frame, num_items: int, config: PrepareConfig) -> None:
    """Write the rivals of each user's targets, drawn once with the split; no row for the other protocols."""
    drawn: splits.IntArray = np.zeros((0, splits.NEGATIVES), dtype=np.int64)
    if config.protocol == "LOO-101":
        item, number = events["item"].to_numpy(), table["events"].to_numpy()
        drawn = splits.draw_negatives(item, number, num_items, splits.NEGATIVES, config.seed)
    column = pa.FixedSizeListArray.from_arrays(drawn.astype(np.int32).ravel(), splits.NEGATIVES)
    write_ipc(sequences / artifacts.NEGATIVES, pa.table([column], schema=artifacts.NEGATIVES_SCHEMA))


def _tied(events: Frame) -> int:
    """Return how many events share user and time with the event before them: their order is the source's."""
    user, time = events["user"].to_numpy(), events["timestamp"].to_numpy()
    return int(((user[1:] == user[:-1]) & (time[1:] == time[:-1])).sum())
