"""Steam reviews and games."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS
from seqrec.data.readers.json_lines import json_lines
from seqrec.data.readers.row_checks import Tables, interactions, items

UNPRINTABLE = "\\p{Cc}|^[\u200b\ufeff]|[\u200b\ufeff]$"  # found in user names


def steam(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read Python-literal lines of reviews (with days as times and names as user ids) and of games."""
    names = {"username": "user_id", "product_id": "item_id", "date": "timestamp"}
    unprintable = pl.col("user_id").str.strip_chars().str.contains(UNPRINTABLE)
    problem = pl.coalesce("_problem", pl.when(unprintable).then(pl.lit("user_id has control characters")))
    lines = json_lines(files["interactions"], dict.fromkeys(names, pl.String), literals=True)
    reviews = (frame.rename(names).with_columns(problem.alias("_problem")) for frame in lines)
    if "items" not in files:
        return Tables(interactions(reviews, files["interactions"]), None)
    texts = dict.fromkeys(("id", "title", "app_name", "developer", "publisher"), pl.String)
    games = (
        frame.select(
            *MARKS,
            pl.col("id").alias("item_id"),
            pl.coalesce("title", "app_name").alias("title"),
            "developer",
            "publisher",
            pl.col("genres").list.join(", "),
        )
        for frame in json_lines(files["items"], {**texts, "genres": pl.List(pl.String)}, literals=True)
    )
    return Tables(interactions(reviews, files["interactions"]), items(games, files["items"]))
