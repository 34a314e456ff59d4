"""From a raw log to sequences, each stage in a process of its own: `python -m benchmarks.scale --rows 20000000`.

The log is that of `benchmarks.logs`. `reference` is what polars needs to make one list a user of the ingested table, in
order of time: no parsing, no filter, no numbering, no split.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import logs, meter
from seqrec.config import IngestConfig, PrepareConfig, ValidateConfig

STAGES = ("ingest", "prepare", "validate", "reference")
HEADER = ("stage", "wall, s", "CPU, s", "peak, MiB")


def work(stage: str, folder: Path, settings: Mapping[str, Any], engine: str = "polars") -> None:
    """Run a stage in this process; `engine` is that of validate."""
    data, verdict = folder / "data", folder / "validation.json"
    if stage == "ingest":
        from seqrec.stages.ingest import ingest

        log = IngestConfig(source="csv", interactions=str(folder / "log.csv"))
        ingest(dataset="log", output=data, downloads=folder / "downloads", config=log)
    elif stage == "validate":
        from seqrec.stages.validate import validate

        config = ValidateConfig(engine=engine)
        validate(dataset="log", data=data, report=verdict, baseline=folder / "none", config=config)
    elif stage == "prepare":
        from seqrec.stages.prepare import prepare

        chosen = PrepareConfig(**settings)
        prepare(dataset="log", data=data, validation=verdict, sequences=folder / "sequences", config=chosen)
    else:
        table = pl.read_parquet(data / "interactions.parquet", columns=["user_id", "item_id", "timestamp"])
        lists = table.group_by("user_id").agg(pl.all().sort_by("timestamp"))
        lists.write_parquet(folder / "reference.parquet")


def measured(stage: str, folder: Path, settings: Mapping[str, Any], engine: str = "polars") -> dict[str, float]:
    """Run a stage in a process of its own; return its wall and CPU seconds and its peak memory in MiB."""
    command = [sys.executable, "-m", "benchmarks.scale", "--folder", str(folder), "--stage", stage]
    command += ["--prepare", json.dumps(settings), "--validate", engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{stage}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Make the log where it is missing, run the stages, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--prepare", type=json.loads, default={}, help="settings of prepare, as JSON")
    parser.add_argument("--validate", default="polars", help="engine of validate")
    parser.add_argument("--stages", nargs="+", default=["ingest", "validate", "prepare", "reference"], choices=STAGES)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        began = meter.now()
        work(arguments.stage, arguments.folder, arguments.prepare, arguments.validate)
        print(json.dumps({**(meter.now() - began)._asdict(), "peak": meter.peak_memory()}))
        return
    folder = arguments.folder / str(arguments.rows)
    if not (folder / "log.csv").exists():
        logs.write(folder / "log.csv", arguments.rows)
    rows = []
    for stage in arguments.stages:
        figures = measured(stage, folder, arguments.prepare, arguments.validate)
        rows.append((stage, f"{figures['wall']:.1f}", f"{figures['cpu']:.1f}", f"{figures['peak']:,.0f}"))
        print(rows[-1], file=sys.stderr, flush=True)
    print(f"{arguments.rows:,} rows, {meter.machine(pl.thread_pool_size())}\n\n{meter.markdown(HEADER, rows)}")


if __name__ == "__main__":
    main()
