"""The prepare stage: turns interactions into numbered, ordered and split sequences.

Events stay in lazy frames of the engine until they are ordered; values per user and per item are arrays. Only the
events of one shard are in memory at a time, whatever the size of the log.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from seqrec import artifacts
from seqrec.artifacts import read_json, sha256, shard_writer, write_json, write_table
from seqrec.config import ConfigError, PrepareConfig
from seqrec.data import drift, splits, table_engines
from seqrec.data.kcore import k_core
from seqrec.data.splits import Ends, IntArray
from seqrec.data.table_engines import Engine, Frame

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Numbers:
    """The users or items of the prepared dataset, in order of their numbers 1, 2, ..."""

    frame: Frame  # (number, code): the code is used in frames of events
    ids: pa.Array  # (N,) string
    events: IntArray  # (N,)

    def __len__(self) -> int:
        return len(self.events)


@dataclass(frozen=True)
class Coded:
    """Users or items of the raw log; those of a dataset to extend have their old numbers, 1 to `known`, as codes."""

    frame: Frame  # (code, id)
    column: str  # user | item
    known: int


def prepare(*, dataset: str, data: Path, validation: Path, sequences: Path, config: PrepareConfig) -> dict[str, float]:
    """Filter, number, order and split the interactions in `data`, and write the prepared dataset.

    Args:
        dataset: key in `datasets`.
        data: folder of the ingested tables.
        validation: verdict of the validate stage on these tables.
        sequences: output folder for sequences, vocabulary, users and split card.
        config: section `prepare`.

    Returns:
        The counts of the split card.

    Raises:
        ValueError: the tables did not pass validation, or the filters leave nothing to train on.
    """
    events_file = data / artifacts.INTERACTIONS
    input_sha256, verdict = sha256(events_file), read_json(validation)
    if not verdict["success"] or verdict["input_sha256"] != input_sha256:
        raise ValueError(f"{validation} is not a successful validation of {events_file}: run ingest and validate again")
    if config.extend and Path(config.extend).resolve() == sequences.resolve():
        raise ConfigError(
            f"prepare.extend: this stage overwrites {config.extend}; move the earlier sequences elsewhere"
        )
    with table_engines.opened(config.engine, sequences) as engine:
        events, users, items, dropped, cuts = _filter(engine, data, config)
        table = events.join(users.frame, on="user").join(items.frame.rename({"number": "item_number"}), on="item")
        renumbered = {"user": nw.col("number"), "item": nw.col("item_number")}
        table = table.select("timestamp", "row", *(["learnt"] if cuts else []), **renumbered)
        ends, facts = splits.ends(table, users.events, config, cuts)
        counts = _write(engine, sequences, table, ends, users, items, config)
    _write_negatives(sequences, ends, len(items), config)
    card = {
        "dataset": dataset,
        "protocol": config.protocol,
        **facts,
        "ties": f"equal timestamps keep the {'reverse ' if config.newest_first else ''}order of the source rows",
        "newest_first": config.newest_first,
        "deduplicate": config.deduplicate,
        "k_core": {"user": config.min_user_events, "item": config.min_item_events},
        "min_rating": config.min_rating,
        "require_title": config.require_title,
        "val_users": config.val_users,
        "max_cases": config.max_cases,
        "sample_users": config.sample_users,
        "noise_share": config.noise_share,
        "seed": config.seed,
        "counts": counts,
        "dropped": dropped,
        "input_sha256": input_sha256,
        "split_sha256": _split_hash(sequences, config),
        **_growth(sequences, config),
    }
    write_json(sequences / artifacts.SPLIT_CARD, card)
    sizes = ", ".join(f"{counts[key]:,} {key}" for key in ("users", "items", "events"))
    logger.info("%s, %s: %s", dataset, config.protocol, sizes)
    return {name: float(value) for name, value in counts.items()}


def _split_hash(sequences: Path, config: PrepareConfig) -> str:
    """Return a hash of the files that decide the cases."""
    files = [artifacts.SEQUENCES, artifacts.USERS, artifacts.VOCABULARY]
    files += [artifacts.NEGATIVES] * (config.protocol == "LOO-101")
    parts = [sha256(sequences / name) for name in files] + [config.cases] * (config.cases != "all")
    parts += [f"{config.max_cases} cases, seed {config.seed}"] * (config.max_cases > 0)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


Cuts = tuple[int, int] | None  # start times of validation and test, if computed before the k-core


def _filter(engine: Engine, data: Path, config: PrepareConfig) -> tuple[Frame, Numbers, Numbers, dict[str, int], Cuts]:
    """Apply the filters in order; return remaining events, users and items, what each filter dropped, and the cuts."""
    dropped: dict[str, int] = {}
    events = engine.read(data / artifacts.INTERACTIONS)
    total = rows = splits.size(events)

    def counted(name: str, rest: Frame) -> Frame:
        nonlocal rows
        before, rows = rows, splits.size(rest)
        dropped[name] = before - rows
        return rest

    if config.min_rating != 0:
        least = nw.lit(config.min_rating).cast(nw.Float32)  # the type of the ratings: 3.6 is not below 3.6
        events = counted("events under min_rating", events.filter(nw.col("rating") >= least))
    if config.require_title:
        titled = engine.read(data / artifacts.ITEMS).filter(nw.col("title").fill_null("").str.len_chars() > 0)
        rest = events.join(engine.keep(titled.select("item_id")), on="item_id", how="semi")
        events = counted("events of items without title", rest)
    people, products = (_code(engine, events, column, config) for column in ("user", "item"))
    events = events.join(people.frame, on="user_id").join(products.frame, on="item_id")
    events = events.select("user", "item", "timestamp", "row")
    events = counted("duplicate events", _unique(engine, events, rows, config))
    on_train = config.protocol == "temporal" and config.filter_on == "train"
    cuts = splits.temporal_cuts(events, config) if rows and on_train else None
    parts = _core(engine, events, cuts, config)
    in_core = _extent(nw.concat(parts))
    for name, before, after in zip(("events", "users", "items"), _extent(events), in_core, strict=True):
        dropped[f"{name} outside the k-core"] = before - after
    if in_core[0] == 0:
        raise ValueError(
            f"no event is left of {total}: lower prepare.min_user_events ({config.min_user_events}), "
            f"prepare.min_item_events ({config.min_item_events}) or prepare.min_rating ({config.min_rating})"
        )
    parts = _sample(engine, parts, people, config)
    users, items = (_numbered(coded, parts, engine) for coded in (people, products))
    return nw.concat(parts), users, items, dropped, cuts


def _unique(engine: Engine, events: Frame, rows: int, config: PrepareConfig) -> Frame:
    """Return the `rows` events without repeated ones; a user's events are in one part, and one part is in memory."""
    if not rows:
        return events
    number = -(-rows // config.shard_events)
    by_user = events.with_columns((nw.col("user") % number).alias("part"))
    parts = engine.divide(by_user, "part", number)
    return nw.concat([engine.store(splits.deduplicate(part, config.deduplicate)) for part in parts])


def _numbered(coded: Coded, parts: Sequence[Frame], engine: Engine) -> Numbers:
    """Return the final numbers: the known ones, then those in the first of `parts`, then those in the next."""
    code, known, size = coded.column, None, coded.known
    if size:
        known = coded.frame.filter(nw.col(code) <= size).select(nw.col(code).alias("number"), code)
    for stop in range(1, len(parts) + 1):
        frame = engine.keep(splits.number(nw.concat(parts[:stop]), code, "number", known, size + 1))
        known, size = frame.select("number", code), splits.size(frame)
    named = engine.table(frame.join(coded.frame, on=code)).sort("number")
    ids = named[f"{code}_id"].to_arrow().cast(pa.string())
    return Numbers(frame.select("number", code), ids, named["events"].to_numpy())


def _core(engine: Engine, events: Frame, cuts: Cuts, config: PrepareConfig) -> list[Frame]:
    """Return the k-core of `events`; with `cuts`, that of events before the first cut, plus other events of its items.

    Events after the cut decide neither the catalogue nor the users to train on. Users outside the core who have later
    events keep all their events, but none is `learnt`: to the model, they are new users with a history.
    """
    before = events if cuts is None else events.filter(nw.col("timestamp") < cuts[0])
    core = engine.store(k_core(before, config.min_user_events, config.min_item_events, engine.keep))
    if cuts is None:
        return [core]
    items, users = (engine.keep(core.select(column).unique()) for column in ("item", "user"))
    known = events.join(items, on="item", how="semi")
    later = known.filter(nw.col("timestamp") >= cuts[0])
    outside = known.filter(nw.col("timestamp") < cuts[0]).join(users, on="user", how="anti")
    read = outside.join(engine.keep(later.select("user").unique()), on="user", how="semi")
    return [
        core.with_columns(learnt=nw.lit(True)),
        engine.store(nw.concat([read, later]).with_columns(learnt=nw.lit(False))),
    ]


def _code(engine: Engine, events: Frame, column: str, config: PrepareConfig) -> Coded:
    name, known, size = f"{column}_id", None, 0
    if config.extend:
        path = Path(config.extend) / {"user": artifacts.USERS, "item": artifacts.VOCABULARY}[column]
        if not path.is_file():
            raise ConfigError(f"prepare.extend: {path} not found; name the folder of the earlier sequences")
        known, size = engine.keep(engine.read(path).select(column, name)), artifacts.open_table(path).metadata.num_rows
    frame = splits.number(events, name, column, known, size + 1).select(column, name)
    return Coded(engine.keep(frame), column, size)


def _extent(events: Frame) -> tuple[int, int, int]:
    """Return the numbers of events, users and items."""
    counted = events.select(
        nw.len().alias("events"), nw.col("user").n_unique().alias("users"), nw.col("item").n_unique().alias("items")
    ).collect()
    total, users, items = (int(counted[name].item() or 0) for name in counted.columns)  # on Spark, null of no rows
    return total, users, items


def _sample(engine: Engine, parts: list[Frame], people: Coded, config: PrepareConfig) -> list[Frame]:
    if config.sample_users == 0:
        return parts
    present = nw.concat(parts).select("user").unique()
    users = engine.table(people.frame.join(present, on="user", how="semi"))
    if config.sample_users >= len(users):
        return parts
    places = splits.sample_users(users["user_id"].to_numpy(), config.sample_users, config.seed)
    drawn = users["user"].to_numpy()[places].tolist()
    return [part.filter(nw.col("user").is_in(drawn)) for part in parts]


def _write(
    engine: Engine,
    sequences: Path,
    events: Frame,
    ends: Ends,
    users: Numbers,
    items: Numbers,
    config: PrepareConfig,
) -> dict[str, int]:
    """Write sequences, vocabulary and users; return the counts."""
    (sequences / artifacts.SPLIT_CARD).unlink(missing_ok=True)  # first, because it marks the rest as complete
    count, tied = _write_sequences(engine, sequences, events, ends, len(items), config)
    vocabulary = [np.arange(1, len(items) + 1, dtype=np.int32), items.ids, count[1:]]
    write_table(sequences / artifacts.VOCABULARY, pa.table(vocabulary, schema=artifacts.VOCABULARY_SCHEMA))
    people = [np.arange(1, len(users) + 1, dtype=np.int32), users.ids]
    write_table(sequences / artifacts.USERS, pa.table(people, schema=artifacts.USERS_SCHEMA))
    return {
        "users": len(users),
        "items": len(items),
        "events": int(ends.events.sum()),
        "train": int(ends.train_end.sum()),
        "valid": int((ends.valid_end - ends.valid_start).sum()),
        "test": int((ends.events - ends.valid_end).sum()),
        "cold_items": int((count[1:] == 0).sum()),
        "users_without_cases": int((ends.events == ends.valid_start).sum()),
        "tied_events": tied,
    }


def _write_sequences(
    engine: Engine, sequences: Path, events: Frame, ends: Ends, num_items: int, config: PrepareConfig
) -> tuple[IntArray, int]:
    """Write the sequences by shard; return the training events (V,) of each item, and the number of tied events."""
    # Noise is drawn for all events at once.
    bounds = _shard_bounds(ends.events, config.shard_events if config.noise_share == 0 else int(ends.events.sum()))
    shard = nw.sum_horizontal(nw.lit(0), *((nw.col("user") > int(user)).cast(nw.Int32) for user in bounds[1:-1]))
    parts = engine.divide(events.with_columns(shard.alias("shard")), "shard", len(bounds) - 1)
    count, tied = np.zeros(num_items + 1, dtype=np.int64), 0
    with shard_writer(sequences / artifacts.SEQUENCES, artifacts.SEQUENCES_SCHEMA) as write:
        for part, first, stop in zip(parts, bounds[:-1], bounds[1:], strict=True):
            shard_ends = Ends(*(values[first:stop] for values in ends))
            keyed = splits.keyed(part, int(first) + 1, newest_first=config.newest_first)
            ordered = engine.ordered(keyed, "key", "row")
            item, time = ordered["item"].to_numpy(), splits.times_of(ordered["key"].to_numpy())
            del ordered
            item = splits.with_noise(item, shard_ends, num_items, config.noise_share, config.seed)
            offsets = np.concatenate([[0], np.cumsum(shard_ends.events)]).astype(np.int32)
            count += _train_counts(item, offsets, shard_ends, len(count))
            tied += _tied(time, offsets)
            write(_shard_table(first, offsets, item, time, shard_ends))
    return count, tied


def _shard_bounds(events: IntArray, most: int) -> NDArray[np.int64]:
    """Return the bounds 0, ..., U: shard i holds the users from bound i to bound i + 1, with about `most` events."""
    before = np.cumsum(events) - events
    before = np.minimum(before, before[events > 0].max())  # the last users may have none
    first = np.flatnonzero(np.diff(before // most, prepend=-1))
    return np.append(first, len(events)).astype(np.int64)


def _shard_table(first: int, offsets: NDArray[np.int32], item: IntArray, time: IntArray, ends: Ends) -> pa.Table:
    columns = [
        np.arange(first + 1, first + len(offsets), dtype=np.int32),
        pa.ListArray.from_arrays(offsets, item.astype(np.int32, copy=False)),
        pa.ListArray.from_arrays(offsets, time),
        ends.train_end.astype(np.int32),
        ends.valid_end.astype(np.int32),
    ]
    return pa.table(columns, schema=artifacts.SEQUENCES_SCHEMA)


def _train_counts(item: IntArray, offsets: NDArray[np.int32], ends: Ends, size: int) -> IntArray:
    """Return the training events of items 0, 1, ... `size` - 1."""
    stop = np.repeat(offsets[:-1] + ends.train_end.astype(np.int32), ends.events)
    return np.bincount(item[np.arange(len(item), dtype=np.int32) < stop], minlength=size)


def _tied(time: IntArray, offsets: NDArray[np.int32]) -> int:
    """Return the number of events with the user and time of the previous event, which stay in source order."""
    equal = time[1:] == time[:-1]
    inner = offsets[1:-1]
    equal[inner[(inner > 0) & (inner < len(time))] - 1] = False  # pairs across two users
    return int(equal.sum())


def _write_negatives(sequences: Path, ends: Ends, num_items: int, config: PrepareConfig) -> None:
    """Write the sampled negatives of each user, drawn once with the split; no rows for other protocols."""
    drawn: IntArray = np.zeros((0, splits.NEGATIVES), dtype=np.int64)
    if config.protocol == "LOO-101":
        item = np.concatenate([chunk.values.to_numpy() for chunk in _lists(sequences)])
        drawn = splits.draw_negatives(item, ends.events, num_items, splits.NEGATIVES, config.seed)
    column = pa.FixedSizeListArray.from_arrays(drawn.astype(np.int32).ravel(), splits.NEGATIVES)
    with shard_writer(sequences / artifacts.NEGATIVES, artifacts.NEGATIVES_SCHEMA) as write:
        write(pa.table([column], schema=artifacts.NEGATIVES_SCHEMA))


def _lists(sequences: Path) -> list[pa.Array]:
    """Return the memory-mapped items of each user, by shard."""
    return artifacts.map_ipc(sequences / artifacts.SEQUENCES)["items"].chunks


def _growth(sequences: Path, config: PrepareConfig) -> dict[str, Any]:
    """Return the entries of the card about the dataset that this one extends, if any."""
    if not config.extend:
        return {}
    old = Path(config.extend)
    users = (np.concatenate([np.diff(c.offsets.to_numpy()) for c in _lists(folder)]) for folder in (old, sequences))
    items = [_item_events(folder) for folder in (old, sequences)]
    report = {"users": drift.report(*users), "items": drift.report(*items)}
    for name, values in report.items():
        logger.info("%s: %s", name, ", ".join(f"{value:,} {key}" for key, value in values.items()))
    absent = 1 + np.flatnonzero(items[1] == 0)  # numbers of items that are gone
    split = read_json(old / artifacts.SPLIT_CARD)["split_sha256"]
    return {"extends": {"split_sha256": split, **report}, "absent": absent.tolist()}


def _item_events(sequences: Path) -> IntArray:
    size = artifacts.open_table(sequences / artifacts.VOCABULARY).metadata.num_rows + 1
    counts = [np.bincount(chunk.values.to_numpy(), minlength=size) for chunk in _lists(sequences)]
    return np.sum(counts, axis=0)[1:]
