"""The service's store of events: imports training data into it, and exports its events for training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.config import ConfigError
from seqrec.config.checks import suggestion
from seqrec.serving import experiment
from seqrec.serving.events import KINDS, POSITIVE, VARIABLE, Store, dump, missing, store_url

logger = logging.getLogger(__name__)


def events(
    action: Literal["import", "dump", "compare"],
    *,
    store: str = "",
    interactions: Path = Path("data/interactions.parquet"),
    output: str = "events.csv",
    kinds: Sequence[str] = POSITIVE,
    versions: Sequence[str] = (),
) -> dict[str, float]:
    """Import training data into the store of events, dump its events for `ingest`, or compare two versions.

    Args:
        action: import (add --interactions to the store; known events are skipped), dump (write the events to --output,
            for `ingest.source: csv`) or compare (click-through of two --versions, with an interval).
        store: SQLAlchemy URL, sqlite:///FILE or postgresql+psycopg://...; default: the variable SEQREC_STORE.
        interactions: the table that `ingest` wrote.
        output: CSV file with the columns user_id, item_id and timestamp; a path, or an address such as
            s3://BUCKET/events.csv.
        kinds: kinds of events to dump, separated by commas: view, buy, hide.
        versions: versions to compare: CHAMPION,CANDIDATE.

    Returns:
        The number of events imported or dumped, or the difference of the rates with its interval.

    Raises:
        ConfigError: a kind does not exist, a flag has no effect, no store is named, or its file is missing.
        ValueError: the store has no such events, or no answers of a version.
    """
    for name, reader, given in (
        ("interactions", "import", interactions != Path("data/interactions.parquet")),
        ("output", "dump", output != "events.csv"),
        ("kinds", "dump", tuple(kinds) != POSITIVE),
        ("versions", "compare", any(versions)),
    ):
        if given and action != reader:
            raise ConfigError(f"--{name} has no effect with {action}, only with {reader}")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kinds: no kind {kind!r:.80}{suggestion(kind, KINDS)}")
    url = store_url(store)
    if not url:
        raise ConfigError(f"name the store with --store or {VARIABLE}")
    if action != "import" and (file := missing(url)):
        raise ConfigError(f"--store: there is no file {file}")
    opened = Store(url)
    if action == "compare":
        return _compare(opened, versions)
    if action == "import":
        number = opened.seed(interactions)
        logger.info("added %d new events from %s to the event store", number, interactions)
    else:
        number = dump(opened, output, kinds)
        logger.info("%s: %d events", output, number)
    return {"events": float(number)}


def _compare(store: Store, versions: Sequence[str]) -> dict[str, float]:
    if len(set(versions)) != 2 or len(versions) != 2:
        raise ConfigError(f"--versions must be CHAMPION,CANDIDATE, not {','.join(versions)!r}")
    found = show_clicks(store, *versions)
    for rate in (found.champion, found.candidate):
        if not rate.answers:
            raise ValueError(f"since both versions have answered, no user was shown a list of version {rate.version}")
    return {"difference": found.difference, "low": found.low, "high": found.high}


def show_clicks(store: Store, champion: str, candidate: str) -> experiment.Comparison:
    """Print the click-through of two versions side by side; return it."""
    found = experiment.compare(store.clicks(champion, candidate), champion, candidate)
    table = Table("", "version", "users", "answers", "click-through")
    for name, rate in (("champion", found.champion), ("candidate", found.candidate)):
        shown = f"{rate.rate:.4f}" if rate.answers else "-"
        table.add_row(name, escape(rate.version), f"{rate.users:,}", f"{rate.answers:,}", shown)
    console = Console()
    console.print(table)
    console.print(str(found))
    return found
