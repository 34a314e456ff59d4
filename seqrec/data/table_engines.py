"""The engines that run the table logic of `prepare`: polars on one machine, or a Spark cluster.

The logic is written once, on lazy Narwhals frames. An engine defines how a frame is read, materialised, divided and
collected; nothing else differs. Both engines have the same methods.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import narwhals as nw
import polars as pl

from seqrec.artifacts import open_table
from seqrec.config import ConfigError

Frame = nw.LazyFrame[Any]
Table = nw.DataFrame[Any]
SETTING = "prepare.engine, validate.engine: spark"  # of errors: either asks for it


class Polars:
    """The streaming engine of polars; tables of events are Parquet files in a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.numbers = itertools.count()

    def read(self, path: Path) -> Frame:
        """Return the Parquet file `path`."""
        open_table(path)  # polars' own error is not a ValueError
        return nw.from_native(pl.scan_parquet(path, glob=False))

    def table(self, frame: Frame) -> Table:
        """Return the rows of `frame` in memory."""
        return frame.collect()

    def ordered(self, frame: Frame, *by: str) -> Table:
        """Return the rows of `frame` in memory, sorted by the columns `by`, which are unique for each row.

        They are sorted in memory, because the streaming engine would take three times as long.
        """
        return frame.collect().sort(*by)

    def keep(self, frame: Frame) -> Frame:
        """Materialise `frame`, a table of users or items that later steps join repeatedly."""
        return frame.collect().lazy()

    def store(self, frame: Frame) -> Frame:
        """Materialise `frame`, a table of events, in the scratch folder."""
        path = self._path()
        self._sink(frame, path)
        return self.read(path)

    def divide(self, frame: Frame, column: str, number: int) -> list[Frame]:
        """Return a frame of the events for each value 0 to `number` - 1 of `column`, without empty frames."""
        if number == 1:
            return [frame.drop(column)]
        folder = self._path()
        folder.mkdir()
        self._sink(frame, pl.PartitionBy(folder, key=column, include_key=False))
        parts = [folder / f"{column}={part}" for part in range(number)]
        files = [sorted(part.glob("*.parquet")) for part in parts]
        return [nw.from_native(pl.scan_parquet(own, glob=False)) for own in files if own]

    def _sink(self, frame: Frame, target: Path | pl.PartitionBy) -> None:
        native: pl.LazyFrame = frame.to_native()
        native.sink_parquet(target, compression="lz4", statistics=False, maintain_order=False, engine="streaming")

    def _path(self) -> Path:
        return self.scratch / f"{next(self.numbers)}.parquet"


class Spark:
    """Spark: the active session, or a new one, configured by Spark's own means (SPARK_CONF_DIR, spark-submit)."""

    def __init__(self) -> None:
        try:
            from pyspark.errors import PySparkRuntimeError
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise ConfigError(f"{SETTING} needs pyspark: pip install 'seqrec[spark]'") from error
        builder = SparkSession.builder.appName("seqrec prepare")
        builder.config("spark.sql.caseSensitive", "true")  # items may have the attributes `genre` and `Genre`
        try:
            self.session = builder.getOrCreate()
        except PySparkRuntimeError as error:  # Java's own message is on stderr
            raise ConfigError(
                f"{SETTING} needs Java 17 or newer, in JAVA_HOME or on the PATH, and valid Spark settings: {error}"
            ) from error

    def read(self, path: Path) -> Frame:
        """Return the Parquet file `path`."""
        open_table(path)  # Spark's own error is not a ValueError
        # not a pattern, and not on the cluster's default file system, from which the rest of seqrec does not read
        local = "file://" + re.sub(r"[\\*?{}\[\]]", r"\\\g<0>", str(path.absolute()))
        return nw.from_native(self.session.read.parquet(local))

    def table(self, frame: Frame) -> Table:
        """Return the rows of `frame` in the driver's memory."""
        return frame.collect(backend="polars")

    def ordered(self, frame: Frame, *by: str) -> Table:
        """Return the rows of `frame` in the driver's memory, sorted by the cluster by the columns `by`."""
        return self.table(frame.sort(*by))

    def keep(self, frame: Frame) -> Frame:
        """Materialise `frame`."""
        return nw.from_native(frame.to_native().localCheckpoint())

    def store(self, frame: Frame) -> Frame:
        """Materialise `frame`."""
        return self.keep(frame)

    def divide(self, frame: Frame, column: str, number: int) -> list[Frame]:
        """Return a frame of the events for each value of `column`."""
        if number == 1:
            return [frame.drop(column)]
        stored = self.keep(frame)
        return [stored.filter(nw.col(column) == part).drop(column) for part in range(number)]


Engine = Polars | Spark


@contextmanager
def opened(name: str, output: Path) -> Iterator[Engine]:
    """Yield the engine `name`; its scratch files are in `output` and are deleted at the end."""
    if name == "spark":
        logging.getLogger("py4j").setLevel(logging.WARNING)
        yield Spark()
        return
    scratch = output / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
    scratch.mkdir(parents=True)
    try:
        with pl.Config():
            pl.Config.set_engine_affinity("streaming")  # for every collect, including those in splits.py
            yield Polars(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
