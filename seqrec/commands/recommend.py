"""Recommendations on the command line, for one history or for every user."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.artifacts import MODEL_PREFIX
from seqrec.config import ConfigError, RegisterConfig
from seqrec.config.ranges import ListLength
from seqrec.counts.term import with_counts
from seqrec.data import stores
from seqrec.data.sequences import load as load_sequences
from seqrec.data.sequences import read_items, read_users
from seqrec.evaluation import ranking
from seqrec.serving.recommender import POPULARITY, Recommender, Request, located
from seqrec.training.checkpoint import Checkpoint, load_checkpoint

BESIDE = "The number beside an event says how much the score of the first item drops without that event."
USERS_AT_ONCE = 8_192
logger = logging.getLogger(__name__)
SCORES_SCHEMA = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("items", pa.list_(pa.string()), nullable=False),  # best first
        pa.field("scores", pa.list_(pa.float32()), nullable=False),
    ]
)


def recommend(
    *,
    history: str,
    dataset: str,
    config: RegisterConfig,
    k: ListLength = 10,
    user: str = "",
    exclude: str = "",
    saved: str = "",
    explain: bool = False,
) -> None:
    """Print the best items after a history.

    Args:
        history: item ids, oldest first, separated by commas; an id with a comma needs quotation marks: 'i1,"i2,x"'.
        dataset: dataset whose champion answers.
        config: section `register`.
        k: number of items.
        user: user id.
        exclude: item ids not to show, written like the history.
        saved: model to use instead of the champion: a folder with weights, card, vocabulary and users, or
            models:/NAME/N.
        explain: show how much the first item's score drops without each event of the history.

    Raises:
        ConfigError: a quotation mark is not closed.
        TrackingError: the registry does not answer, or has no such model.
    """
    chosen, left_out = _ids("history", history), _ids("exclude", exclude)
    recommender = Recommender.load(saved or f"models:/{MODEL_PREFIX}{dataset}@champion", config)
    request = Request(history=chosen, k=k, exclude=left_out, user=user or None)
    answer = recommender.answer([request])[0]
    titles = recommender.titles
    drops = [""] * len(request.history)
    if explain and answer.items and answer.source != POPULARITY:
        drops = [f"  {drop:+.3f}" for drop in recommender.explain(request, answer.items[0])]
    console = Console()
    for item_id, drop in zip(request.history, drops, strict=True):
        known = drop if item_id in recommender.items else " (unknown, skipped)"
        console.print(f"after   {escape(item_id)}  {escape(titles.get(item_id, ''))}{known}", highlight=False)
    titled = any(titles.values())
    table = Table("", "item", *(["title"] if titled else []), "score", title=f"{answer.source} recommends")
    for rank, (item_id, score) in enumerate(zip(answer.items, answer.scores, strict=True), start=1):
        title = [escape(titles.get(item_id, ""))] if titled else []
        table.add_row(str(rank), escape(item_id), *title, f"{score:.3f}")
    console.print(table)
    notes = [*answer.notes, *([BESIDE] if any(drops) else [])]
    if answer.source == POPULARITY and ";" in history:
        notes.append("Separate the item ids of --history by commas.")
    for note in notes:
        console.print(note, highlight=False)


def _ids(name: str, text: str) -> list[str]:
    """Return the ids in `text`, one line of CSV."""
    try:
        row = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise ConfigError(
            f"--{name}: {text!r:.80} is not a line of CSV ({error}); put an id with a comma or a quotation mark "
            "between quotation marks, and double those inside it"
        ) from error
    return [item_id.strip() for item_id in row if item_id.strip()]


def score(
    *, sequences: Path, saved: str | Path, output: str | Path, k: ListLength = 10, config: RegisterConfig | None = None
) -> dict[str, float]:
    """Write the best items of every user, after all of the user's events, to a Parquet file.

    Users are scored `USERS_AT_ONCE` at a time, which limits the memory needed beyond the data itself.

    Args:
        sequences: the prepared dataset.
        saved: folder with weights and card, or models:/NAME@champion.
        output: Parquet file with one row per user: user_id, items, scores; a path, or an address such as
            s3://BUCKET/scores.parquet.
        k: number of items per user; as in the evaluation, past items are left out if `filter_seen` is true.
        config: section `register`.

    Returns:
        The number of users.

    Raises:
        ConfigError: the name of the output does not end in .parquet.
        TrackingError: the registry does not answer, or has no such model.
        ValueError: the model was trained on another catalogue.
    """
    if not str(output).endswith(".parquet"):
        raise ConfigError(f"--output: {output} must end in .parquet, because it is written as Parquet")
    with located(saved, config) as folder:
        return score_with(load_checkpoint(folder), sequences, output, k)


@torch.no_grad()
def score_with(checkpoint: Checkpoint, sequences: Path, output: str | Path, k: int) -> dict[str, float]:
    """Write the best `k` items of every user as `score` does, with a checkpoint."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    model = checkpoint.model
    checkpoint.check_catalogue(sequences, users="user" in model.needs)
    data = replace(load_sequences(sequences), count=torch.from_numpy(checkpoint.item_counts))  # of a refit: all events
    item_ids = pa.array([None, *read_items(sequences)], pa.string())
    user_ids, filter_seen = read_users(sequences), checkpoint.card["filter_seen"]
    scorer = with_counts(ranking.model_scorer(model), checkpoint.count_term)
    with stores.written(output) as partial, pq.ParquetWriter(partial, SCORES_SCHEMA) as writer:
        for first in range(0, data.num_users, USERS_AT_ONCE):
            user = torch.arange(first, min(first + USERS_AT_ONCE, data.num_users))
            best = ranking.best(scorer, data, user, data.stop[user], filter_seen=filter_seen, top_k=k)
            writer.write_table(_rows(user_ids[first : first + len(user)], item_ids, *best))
    logger.info("%s: the best items of %d users", output, data.num_users)
    return {"users": float(data.num_users)}


def _rows(user_ids: list[str], item_ids: pa.Array, item_BK: torch.Tensor, score_BK: torch.Tensor) -> pa.Table:
    kept_BK = item_BK != 0
    offsets = torch.nn.functional.pad(kept_BK.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    places = pa.array(offsets.numpy())
    items = pa.ListArray.from_arrays(places, item_ids.take(pa.array(item_BK[kept_BK].numpy())))
    scores = pa.ListArray.from_arrays(places, pa.array(score_BK[kept_BK].numpy()))
    return pa.table([pa.array(user_ids, pa.string()), items, scores], schema=SCORES_SCHEMA)
