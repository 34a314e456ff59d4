"""`seqrec accept-reference`: the data that drift is measured against, in a file of the project or in the registry."""

from __future__ import annotations

import logging
from pathlib import Path

from seqrec import artifacts
from seqrec.config import ConfigError, RegisterConfig
from seqrec.config.ranges import Count
from seqrec.data import log_counts
from seqrec.stages.validate import COUNTED, histogram, read_reference

logger = logging.getLogger(__name__)


def accept_reference(
    *,
    dataset: str,
    config: RegisterConfig,
    data: Path | None = None,
    reference: Path = Path("configs/reference.json"),
    version: Count = 0,
) -> None:
    """Accept data as the reference statistics of `dataset`, against which drift is measured.

    Args:
        dataset: dataset whose statistics are accepted.
        config: section `register`.
        data: folder with interactions.parquet, whose statistics are written to --reference.
        reference: JSON file of reference statistics (accepted histograms); entries of other datasets are kept.
        version: for Kubeflow, in place of --data: version of the registered model whose training data is accepted.

    Raises:
        ConfigError: neither or both of --data and --version are given, there is no such version, or `data` holds
            another dataset.
        ValueError: there are no interactions.
        TrackingError: the tracking server does not answer.
    """
    if (data is None) == (version == 0):
        raise ConfigError("give either --data or --version")
    if data is None:
        from seqrec.tracking.registry import accept_statistics

        accept_statistics(dataset=dataset, version=version, config=config)
        return
    events = log_counts.read_events(data / artifacts.INTERACTIONS)
    if events.is_empty():
        raise ValueError(f"{data / artifacts.INTERACTIONS} has no rows, so {dataset} gets no reference statistics")
    split = data / "sequences" / artifacts.SPLIT_CARD
    if split.is_file() and (held := artifacts.read_json(split)["dataset"]) != dataset:
        raise ConfigError(f"--dataset: {data} holds {held}, not {dataset}: add --dataset {held}")
    entries = read_reference(reference)
    entries[dataset] = {column: histogram(log_counts.events_per(events, column)) for column in COUNTED}
    artifacts.write_json(reference, dict(sorted(entries.items())))
    logger.info("%s: drift of %s is now measured against %s", reference, dataset, data)
