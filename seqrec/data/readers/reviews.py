"""Reviews of Steam and Yelp, and check-ins of Gowalla."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.json_lines import json_lines, texts_of
from seqrec.data.readers.row_checks import Tables, tables

UNPRINTABLE = "\\p{Cc}|^[\u200b\ufeff]|[\u200b\ufeff]$"  # found in user names of Steam


def gowalla(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read check-ins (tabs: user, ISO time, latitude, longitude, place), latest first; places have no texts."""
    names = ("user_id", "timestamp", "latitude", "longitude", "item_id")
    return tables(files, delimited(files["interactions"], names, "\t"))


def yelp(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews, without their text, and of businesses."""
    names = {"user_id": "user_id", "business_id": "item_id", "stars": "rating", "date": "timestamp"}
    reviews = texts_of(files["interactions"], names)
    if "items" not in files:
        return tables(files, reviews)
    texts = {"business_id": "item_id", "name": "title", "categories": "category", "city": "city"}
    businesses = (frame.select(*MARKS, *texts.values()) for frame in texts_of(files["items"], texts))
    return tables(files, reviews, businesses)


def steam(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read Python-literal lines of reviews (with days as times and names as user ids) and of games."""
    names = {"username": "user_id", "product_id": "item_id", "date": "timestamp"}
    unprintable = pl.col("user_id").str.strip_chars().str.contains(UNPRINTABLE)
    problem = pl.coalesce("_problem", pl.when(unprintable).then(pl.lit("user_id has control characters")))
    lines = texts_of(files["interactions"], names)
    reviews = (frame.with_columns(problem.alias("_problem")) for frame in lines)
    if "items" not in files:
        return tables(files, reviews)
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
        for frame in json_lines(files["items"], {**texts, "genres": pl.List(pl.String)})
    )
    return tables(files, reviews, games)
