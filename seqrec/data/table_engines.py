"""Where prepare's table logic runs: polars on this machine, or a Spark cluster.

The logic itself is written once, on lazy Narwhals frames. An engine says how such a frame is read, kept, divided and
collected, which is all that differs.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import narwhals as nw
import polars as pl

from seqrec.config import ConfigError

Frame = nw.LazyFrame[Any]
Table = nw.DataFrame[Any]

ENGINES = ("polars", "spark")


class Engine(Protocol):
    """What a table engine must be able to do."""

    def read(self, path: Path) -> Frame:
        """Return the Parquet file `path`."""

    def table(self, frame: Frame) -> Table:
        """Return the rows of `frame` in memory."""

    def ordered(self, frame: Frame, *by: str) -> Table:
        """Return the rows of `frame` in memory, sorted by the columns `by`, of which no two rows have the same."""

    def keep(self, frame: Frame) -> Frame:
        """Return `frame`, computed now: a table of users or items that later steps join again and again."""

    def store(self, frame: Frame) -> Frame:
        """Return `frame`, computed now, wherever the engine has room for a table of events."""

    def divide(self, frame: Frame, column: str, number: int) -> list[Frame]:
        """Return the events with 0, 1, ... `number` - 1 in the integer `column`, without it; no event, no frame."""

    def union(self, frames: Sequence[Frame]) -> Frame:
        """Return the rows of all `frames`."""


class Polars:
    """The streaming engine of polars; tables of events live in Parquet files of a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.numbers = itertools.count()

    def read(self, path: Path) -> Frame:
        """Return the Parquet file `path`."""
        return nw.from_native(pl.scan_parquet(path))

    def table(self, frame: Frame) -> Table:
        """Return the rows of `frame` in memory."""
        return frame.collect()

    def ordered(self, frame: Frame, *by: str) -> Table:
        """Return the rows of `frame` in memory, sorted there: streaming, polars takes three times as long."""
        return frame.collect().sort(*by)

    def keep(self, frame: Frame) -> Frame:
        """Return `frame`, computed now and held in memory."""
        return frame.collect().lazy()

    def store(self, frame: Frame) -> Frame:
        """Return `frame`, computed now and written to the scratch folder."""
        path = self._path()
        self._sink(frame, path)
        return self.read(path)

    def divide(self, frame: Frame, column: str, number: int) -> list[Frame]:
        """Return the events with 0, 1, ... `number` - 1 in `column`, without it: a scratch folder each."""
        if number == 1:
            return [frame.drop(column)]
        folder = self._path()
        folder.mkdir()
        self._sink(frame, pl.PartitionBy(folder, key=column, include_key=False))
        parts = [folder / f"{column}={part}" for part in range(number)]
        return [nw.from_native(pl.scan_parquet(part / "*.parquet")) for part in parts if part.is_dir()]

    def union(self, frames: Sequence[Frame]) -> Frame:
        """Return the rows of all `frames`."""
        return nw.concat(list(frames))

    def _sink(self, frame: Frame, target: Path | pl.PartitionBy) -> None:
        native: pl.LazyFrame = frame.to_native()
        native.sink_parquet(target, compression="lz4", statistics=False, maintain_order=False, engine="streaming")

    def _path(self) -> Path:
        return self.scratch / f"{next(self.numbers)}.parquet"


class Spark:
    """Spark: the running session, or a new one configured by Spark's own means (SPARK_CONF_DIR, spark-submit)."""

    def __init__(self) -> None:
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise ConfigError("prepare.engine: spark needs pyspark: pip install 'seqrec[spark]'") from error
        self.session = SparkSession.builder.appName("seqrec prepare").getOrCreate()

    def read(self, path: Path) -> Frame:
        """Return the Parquet file `path`."""
        frame: Frame = nw.from_native(self.session.read.parquet(str(path)))
        return frame

    def table(self, frame: Frame) -> Table:
        """Return the rows of `frame` in the driver's memory."""
        return frame.collect(backend="polars")

    def ordered(self, frame: Frame, *by: str) -> Table:
        """Return the rows of `frame` in the driver's memory, sorted by the cluster."""
        return self.table(frame.sort(*by))

    def keep(self, frame: Frame) -> Frame:
        """Return `frame`, computed now."""
        kept: Frame = nw.from_native(frame.to_native().localCheckpoint())
        return kept

    def store(self, frame: Frame) -> Frame:
        """Return `frame`, computed now."""
        return self.keep(frame)

    def divide(self, frame: Frame, column: str, number: int) -> list[Frame]:
        """Return the events with 0, 1, ... `number` - 1 in `column`, without it."""
        stored = self.keep(frame)
        return [stored.filter(nw.col(column) == part).drop(column) for part in range(number)]

    def union(self, frames: Sequence[Frame]) -> Frame:
        """Return the rows of all `frames`."""
        return nw.concat(list(frames))


@contextmanager
def opened(name: str, output: Path) -> Iterator[Engine]:
    """Yield the engine `name`; its scratch files lie in `output` until it is closed."""
    if name == "spark":
        logging.getLogger("py4j").setLevel(logging.WARNING)
        yield Spark()
        return
    scratch = output / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed run has left
    scratch.mkdir(parents=True)
    try:
        with pl.Config():
            pl.Config.set_engine_affinity("streaming")  # of every collect, also of those in splits
            yield Polars(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
