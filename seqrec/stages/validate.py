"""The validate stage: checks the tables that `ingest` wrote before any training.

A failed `critical` rule stops the run; failed `warning` and `info` rules are reported and logged. Drift compares the
distributions of events per user and per item with accepted reference statistics.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from seqrec import artifacts
from seqrec.config import ValidateConfig
from seqrec.data import log_counts
from seqrec.data.drift import stability_index

if TYPE_CHECKING:
    from seqrec.data.expectations import Check
    from seqrec.data.log_counts import LogCounts

logger = logging.getLogger(__name__)
logging.getLogger("great_expectations").setLevel(logging.WARNING)  # its import logs hundreds of lines

COUNTED = ("item_id", "user_id")  # whose events per id are compared
POSITIONS = ("lines", "prefixes")  # sources whose timestamps are positions in a sequence, not dates


class ValidationFailed(ValueError):  # noqa: N818 - says what happened to the stage
    """Critical rules failed; the message names them with offending values and the setting to change."""


def validate(*, dataset: str, data: Path, report: Path, reference: Path, config: ValidateConfig) -> dict[str, float]:
    """Check the tables in `data`; write the verdict to `report` (JSON) and to an HTML file beside it.

    Args:
        dataset: name of the dataset in `reference`.
        data: folder with interactions.parquet, items.parquet and source.json, as ingest writes them.
        report: the JSON file to write.
        reference: JSON file of accepted histograms; without an entry for `dataset`, drift is not measured.
        config: the limits.

    Returns:
        Counts and shares of the log, and the number of rules that failed without stopping.

    Raises:
        ValidationFailed: a critical rule failed; both reports are still written.
    """
    from seqrec.data import expectations  # imported here, because Great Expectations takes seconds

    paths = data / artifacts.INTERACTIONS, data / artifacts.ITEMS
    checks = expectations.run(expectations.schema_suites(*(artifacts.open_table(path).schema_arrow for path in paths)))
    statistics: dict[str, float] = {}
    histograms: dict[str, Any] = {}
    if all(check.success for check in checks):
        catalogue = pl.read_parquet(paths[1], columns=["item_id", "title"], glob=False)
        spark = config.engine == "spark"
        log = log_counts.on_spark(paths[0]) if spark else log_counts.in_memory(log_counts.read_events(paths[0]))
        ids = log.items.drop_nulls().cast(pl.String)
        unknown = ids.filter(~ids.is_in(catalogue["item_id"].drop_nulls().implode())).sort()
        accepted = read_reference(reference).get(dataset, {}) if len(ids) else {}
        with artifacts.whole(reference):
            drifts = {name: drift(entry, log.events[name]) for name, entry in accepted.items()}
        source, published = _source(data)
        suites = expectations.content_suites(
            log, catalogue, unknown, drifts, published, config, dated=source not in POSITIONS
        )
        checks += expectations.run(suites)
        statistics = _statistics(log, unknown, drifts)
        histograms = {name: histogram(log.events[name]) for name in COUNTED if len(log.events[name])}
    failed = [check for check in checks if not check.success]
    critical = [check for check in failed if check.severity == "critical"]
    verdict = {
        "success": not critical,
        "dataset": dataset,
        "input_sha256": artifacts.sha256(paths[0]),
        "checks": [dataclasses.asdict(check) for check in checks],
        "statistics": statistics,
        "histograms": histograms,
    }
    artifacts.write_json(report, verdict)
    artifacts.write_text(report.with_suffix(".html"), expectations.to_page(dataset, checks))
    for check in failed:
        if check.severity == "warning":
            logger.warning("%s: %s", dataset, _describe(check))
    if critical:
        lines = "\n".join(f"- {_describe(check)}" for check in critical)
        raise ValidationFailed(f"{dataset}: critical rules failed, see {report.with_suffix('.html')}\n{lines}")
    return {**statistics, "failed_rules": float(len(failed))}


def histogram(counts: np.ndarray) -> dict[str, list[float]]:
    """Return `edges` 1, 2, 4, ... and the `shares` of the positive `counts` in these bins; the last one is open."""
    edges = [2**power for power in range(int(counts.max()).bit_length())]
    return {"edges": edges, "shares": [round(share, 6) for share in _shares(counts, edges).tolist()]}


def drift(entry: Mapping[str, Sequence[float]], counts: np.ndarray) -> float:
    """Return the population stability index of `counts` against a `histogram`."""
    return stability_index(np.asarray(entry["shares"]), _shares(counts, entry["edges"]))


def _shares(counts: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    return np.histogram(counts, bins=[*edges, np.inf])[0] / len(counts)


def read_reference(path: Path) -> dict[str, Any]:
    """Return the entries of a file of reference statistics, by dataset; none if there is no file."""
    return artifacts.read_json(path) if path.exists() else {}


def _source(data: Path) -> tuple[str, dict[str, int]]:
    """Return the name of the source and its known counts; none for tables that another program wrote."""
    card = data / artifacts.SOURCE_CARD
    content = artifacts.read_json(card) if card.is_file() else {}
    known = content.get("reference") or {}
    return content.get("source", ""), {name: count for name, count in known.items() if count is not None}


def _statistics(log: LogCounts, unknown: pl.Series, drifts: Mapping[str, float]) -> dict[str, float]:
    values: dict[str, Any] = {
        "rows": log.rows,
        "users": len(log.events["user_id"]),
        "items": len(log.events["item_id"]),
        "distinct_times": log.distinct_times,
        "duplicate_share": log.repeats / max(log.rows, 1),
        "unknown_items": len(unknown),
        "user_drift": drifts.get("user_id"),
        "item_drift": drifts.get("item_id"),
        "first_timestamp": log.first,
        "last_timestamp": log.last,
    }
    for column, counts in log.events.items():
        if len(counts):
            name = f"events_per_{column.removesuffix('_id')}"
            values |= {f"{name}_median": float(np.median(counts)), f"{name}_max": int(counts[-1])}
    return {name: round(float(value), 6) for name, value in values.items() if value is not None}


def _describe(check: Check) -> str:
    where = f"{check.table}.{check.column}" if check.column else check.table
    observed = check.observed if " " in check.observed else f"found {check.observed}"  # a sentence, or a number
    return f"{where} ({check.severity}): the rule '{check.rule}' is not met: {observed}{check.shown}; {check.advice}"
