"""The ingest stage: converts a published dataset to the canonical tables, and counts all malformed rows."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from seqrec import artifacts
from seqrec.config import ConfigError, IngestConfig
from seqrec.data import dvc_revisions, sources
from seqrec.data.download import SourceFile, forget, mirror_of, obtain, set_aside
from seqrec.data.readers import CheckedRows, DamagedFileError, own_files

logger = logging.getLogger(__name__)

EXAMPLES = 3
COUNTED = {  # counts, in the words of the log
    "rows": "rows",
    "users": "users",
    "items": "items",
    "catalogue": "items in the catalogue",
    "quarantined": "malformed rows",
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Tally:
    """The rows of a table: the numbers of good and bad ones, and the first bad ones."""

    good: int = 0
    bad: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


class Distinct:
    """The distinct ids of a column, in order of appearance; its memory is that of these ids and of a few blocks."""

    def __init__(self) -> None:
        self.found = pl.Series(dtype=pl.String)
        self.fresh: list[pl.Series] = []

    def add(self, ids: pl.Series) -> None:
        """Add the ids of a block."""
        self.fresh.append(ids.unique(maintain_order=True))
        if sum(map(len, self.fresh)) > len(self.found):
            self.ids()

    def ids(self) -> pl.Series:
        """Return all distinct ids."""
        self.found = pl.concat([self.found, *self.fresh]).unique(maintain_order=True)
        self.fresh = []
        return self.found


def ingest(
    *, dataset: str, output: Path, downloads: Path, config: IngestConfig, events: Path | None = None
) -> dict[str, float]:
    """Fetch and read the source of `config` into `output`.

    Writes `raw/<source>/` (the published files), `interactions.parquet`, `items.parquet`, `quarantine.parquet` and,
    last, `source.json`. If it is killed at any moment, running it again gives the same result: downloads are resumed in
    `downloads`, and deleted once the stage has succeeded.

    Args:
        dataset: key in `datasets`, for messages.
        output: output folder; results of earlier runs in it are replaced.
        downloads: folder of unfinished downloads.
        config: section `ingest` of the dataset.
        events: Parquet file of events to add to the events of the source; needed with `ingest.events`.

    Returns:
        `rows`, `users`, `items` (those with interactions), `catalogue` (rows of the items table), `quarantined`.

    Raises:
        ConfigError: a setting of `datasets.<dataset>.ingest` is wrong.
        ValueError: the files are not available, damaged or empty, or have too many malformed rows.
        OSError: the output cannot be written.
    """
    try:
        if config.events and events is None:
            raise ConfigError(
                "ingest.events: DVC cannot track the event store; use `seqrec run`, or a pipeline on Kubeflow"
            )
        return _ingest(output, downloads, config, events if config.events else None)
    except ConfigError as error:
        raise ConfigError(f"datasets.{dataset}.{error}") from error
    except ValueError as error:
        raise ValueError(f"datasets.{dataset}: {error}") from error
    except OSError as error:
        if error.errno in NO_ROOM:
            message = f"the disk has no room for {output} and {downloads} ({error}): free some space and run again"
            raise OSError(error.errno, message) from error
        raise


def _ingest(output: Path, downloads: Path, config: IngestConfig, events: Path | None) -> dict[str, float]:
    source = sources.find(config)
    if config.repository:
        return dvc_revisions.fetch(output, config)
    publications = source.publications
    _clear(output, publications, mirror_of(config))
    found, counts, files = _read(output, publications, downloads, config, events)
    artifacts.write_json(
        output / artifacts.SOURCE_CARD,
        {
            "source": config.source,
            "category": config.category,
            "licence": source.licence,
            "homepage": source.homepage,
            "files": files,
            "counts": counts,
            "reference": {} if events else dict(source.reference),  # of the source alone
        },
    )
    forget(found.values(), downloads)
    logger.info("%s: %s", config.source, ", ".join(f"{counts[key]:,} {text}" for key, text in COUNTED.items()))
    return {name: float(value) for name, value in counts.items()}


def _read(
    output: Path,
    publications: tuple[sources.Publication, ...],
    downloads: Path,
    config: IngestConfig,
    events: Path | None,
) -> tuple[dict[str, SourceFile], dict[str, int], list[dict[str, Any]]]:
    """Return the files, the counts of the tables, and the cards of the files in `raw`.

    A damaged download is set aside and repeated once.
    """
    for last in (False, True):
        publication, found = obtain(publications, config, downloads)
        before = _states(found)
        try:
            counts = _write_tables(output, publication, found, config, events)
            cards = _keep_raw(output / "raw" / config.source, found)
            if changed := [file.name for file, state in _states(found).items() if state != before[file]]:
                raise ValueError(f"{changed[0]} changed while it was read: ingest a copy of it")
            return found, counts, cards
        except DamagedFileError as error:
            if not set_aside(error.path, downloads, error) or last:
                raise
    raise AssertionError


def _clear(output: Path, publications: tuple[sources.Publication, ...], mirror: str) -> None:
    """Delete results of an earlier run, but never a file that is to be read."""
    own = [file for publication in publications if publication.local for file in publication.files]
    for setting, path in [("mirror", mirror), *((file.role, file.paths[0]) for file in own)]:
        if path and Path(path).resolve().is_relative_to(output.resolve()):
            raise ConfigError(f"ingest.{setting}: {path} lies in {output}, which this stage overwrites")
    output.mkdir(parents=True, exist_ok=True)
    (output / artifacts.SOURCE_CARD).unlink(missing_ok=True)  # first, because it marks the rest as complete
    for name in (artifacts.INTERACTIONS, artifacts.ITEMS, artifacts.QUARANTINE):
        (output / name).unlink(missing_ok=True)
    for name in sources.SOURCES:  # `raw` itself may be a folder of the user's own
        shutil.rmtree(output / "raw" / name, ignore_errors=True)


def _write_tables(
    output: Path,
    publication: sources.Publication,
    found: dict[str, SourceFile],
    config: IngestConfig,
    events: Path | None,
) -> dict[str, int]:
    tables = publication.read({role: file.path for role, file in found.items()}, config)
    blocks = tables.interactions if events is None else _followed(tables.interactions, events)
    quarantine = output / artifacts.QUARANTINE
    with _writer(quarantine, artifacts.QUARANTINE_SCHEMA) as bad_rows:
        tally, users, items = _write_interactions(output, blocks, bad_rows)
        products = _write_items(output, tables.items, items, bad_rows)
    for table, name in ((tally, "interactions"), (products, "items")):
        _check(table, name, config, quarantine)
    return {
        "rows": tally.good,
        "users": len(users),
        "items": len(items),
        "catalogue": artifacts.open_table(output / artifacts.ITEMS).metadata.num_rows,
        "quarantined": tally.bad + products.bad,
    }


def _followed(blocks: Iterator[CheckedRows], events: Path) -> Iterator[CheckedRows]:
    """Yield the blocks of the source, then those of the file `events`, whose rows have the numbers that follow."""
    last = 0
    for block in blocks:
        last = max(last, block.good.select(pl.col("row").max().fill_null(0)).item())
        yield block
    for block in own_files({"interactions": events}, IngestConfig(source="csv")).interactions:
        yield block._replace(good=block.good.with_columns(pl.col("row") + last + 1))


@contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    # Dictionary and delta encodings take a third of the size and time of plain pages.
    growing = [name for name in ("timestamp", "row", "line") if name in schema.names]
    encoding = dict.fromkeys(growing, "DELTA_BINARY_PACKED")
    repeating = [name for name in schema.names if name not in growing]
    options = {"use_dictionary": repeating, "column_encoding": encoding, "compression": "zstd"}
    with artifacts.written(path) as partial, pq.ParquetWriter(partial, schema, **options) as writer:
        yield writer


def _write_interactions(
    output: Path, blocks: Iterator[CheckedRows], bad_rows: pq.ParquetWriter
) -> tuple[Tally, pl.Series, pl.Series]:
    """Write the events; return their tally and the users and items that occur."""
    tally, users, items = Tally(), Distinct(), Distinct()
    with _writer(output / artifacts.INTERACTIONS, artifacts.INTERACTIONS_SCHEMA) as writer:
        for block in _read_ahead(blocks):
            writer.write_table(_arrow(block.good, artifacts.INTERACTIONS_SCHEMA))
            _set_aside(block, tally, bad_rows)
            users.add(block.good["user_id"])
            items.add(block.good["item_id"])
    return tally, users.ids(), items.ids()


def _read_ahead(blocks: Iterator[CheckedRows]) -> Iterator[CheckedRows]:
    """Yield the blocks; a second thread reads the next one while the current one is written."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)
            yield block


def _write_items(
    output: Path, blocks: Iterator[CheckedRows] | None, occurring: pl.Series, bad_rows: pq.ParquetWriter
) -> Tally:
    """Write each item once, from its first row; without an items file, the ids that occur."""
    tally, frames = Tally(), []
    if blocks is None:
        frames = [pl.DataFrame({"item_id": occurring}).with_columns(pl.lit(None, pl.String).alias("title"))]
        tally.good = len(occurring)
    for block in blocks or ():
        frames.append(block.good)
        _set_aside(block, tally, bad_rows)
    if not frames:
        return tally
    items = pl.concat(frames).unique("item_id", keep="first", maintain_order=True)
    if again := tally.good - len(items):
        logger.warning("items: %s rows repeat the id of an earlier row and are not used", f"{again:,}")
    attributes = [pa.field(name, pa.string()) for name in items.columns if name not in ("item_id", "title")]
    schema = pa.schema([*artifacts.ITEMS_SCHEMA, *attributes])
    artifacts.write_table(output / artifacts.ITEMS, _arrow(items, schema))
    return tally


def _set_aside(block: CheckedRows, tally: Tally, bad_rows: pq.ParquetWriter) -> None:
    tally.good += len(block.good)
    tally.bad += len(block.bad)
    tally.examples += block.bad.head(EXAMPLES - len(tally.examples)).to_dicts()
    if len(block.bad):
        bad_rows.write_table(_arrow(block.bad, artifacts.QUARANTINE_SCHEMA))


def _arrow(frame: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    return frame.select(schema.names).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)


def _advice(tally: Tally) -> str:
    if all(row["reason"].startswith("timestamp is neither") for row in tally.examples):
        return 'Name the format of the times, such as ingest.time_format: "%d/%m/%Y %H:%M".'
    return "Check that ingest.source and ingest.columns fit the file."


def _check(tally: Tally, name: str, config: IngestConfig, quarantine: Path) -> None:
    total = tally.good + tally.bad
    if not total:
        raise ValueError(f"the {name} file is empty: it has no rows")
    if tally.bad / total > config.max_bad_share:
        first = "".join(
            f"\n  {row['file']}:{row['line']}: {row['reason']}: {row['text']:.80}" for row in tally.examples
        )
        raise ValueError(
            f"{tally.bad:,} of {total:,} rows of {name} are malformed ({tally.bad / total:.1%}), more than "
            f"ingest.max_bad_share = {config.max_bad_share:g} allows. The first ones:{first}\n"
            f"All are in {quarantine}. {_advice(tally)} To go on without these rows, raise ingest.max_bad_share."
        )
    if not tally.good:
        raise ValueError(f"the {name} file has no well-formed row")


def _keep_raw(folder: Path, found: dict[str, SourceFile]) -> list[dict[str, Any]]:
    """Copy the files to `folder`; return what source.json says of each."""
    names, cards = [file.path.name for file in found.values()], []
    for role, file in found.items():
        path = folder / (file.path.name if names.count(file.path.name) == 1 else f"{role}-{file.path.name}")
        with artifacts.written(path) as partial:
            shutil.copyfile(file.path, partial)
        card = {"role": role, "name": path.name, "origin": file.origin, "size": path.stat().st_size}
        cards.append({**card, "sha256": artifacts.sha256(path)})
    return cards


def _states(found: dict[str, SourceFile]) -> dict[Path, tuple[int, int]]:
    states = {file.path: file.path.stat() for file in found.values()}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}
