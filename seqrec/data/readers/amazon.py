"""Amazon reviews of 2014, 2018 and 2023 with their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS, Frames
from seqrec.data.readers.csv_files import events
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.json_lines import json_lines, texts_of
from seqrec.data.readers.row_checks import Tables, tables, unescaped

AMAZON_ITEM = {"asin": ("item_id", pl.String), "title": ("title", pl.String), "brand": ("brand", pl.String)}


def amazon_2014(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews and Python-literal lines of metadata."""
    categories = pl.List(pl.List(pl.String))
    flat = pl.col("category").list.eval(pl.element().explode())
    products = _products(files, {**AMAZON_ITEM, "categories": ("category", categories)}, flat)
    return tables(files, _reviews(files), products)


def amazon_2018(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews and of metadata."""
    return tables(files, _reviews(files), _products_2018(files))


def amazon_2018_ratings(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a CSV of ratings without a header (item, user, rating, time) and JSON lines of metadata."""
    ratings = delimited(files["interactions"], ("item_id", "user_id", "rating", "timestamp"), ",")
    return tables(files, ratings, _products_2018(files))


def amazon_2023(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a CSV of ratings (`parent_asin`, times in milliseconds) and JSON lines of metadata."""
    fields = {
        "parent_asin": ("item_id", pl.String),
        "title": ("title", pl.String),
        "store": ("brand", pl.String),
        "categories": ("category", pl.List(pl.String)),
    }
    products = _products(files, fields, pl.col("category"))
    return tables(files, events(files["interactions"], {"item_id": "parent_asin"}), products)


def _reviews(files: Mapping[str, Path]) -> Frames:
    names = {"reviewerID": "user_id", "asin": "item_id", "overall": "rating", "unixReviewTime": "timestamp"}
    return texts_of(files["interactions"], names)


def _products(files: Mapping[str, Path], fields: Mapping[str, tuple[str, Any]], category: pl.Expr) -> Frames | None:
    """Return the metadata, if any; `fields` maps its keys to our names and polars types."""
    if "items" not in files:
        return None
    types = {key: kind for key, (_, kind) in fields.items()}
    names = {key: name for key, (name, _) in fields.items()}
    categories = category.list.join(", ").alias("category")
    # Some titles of the 2018 crawl are scripts of the page.
    title = pl.when(~pl.col("title").str.contains("getTime", literal=True)).then(pl.col("title"))
    return (
        frame.rename(names).select(*MARKS, "item_id", title, unescaped(pl.col("brand")), unescaped(categories))
        for frame in json_lines(files["items"], types)
    )


def _products_2018(files: Mapping[str, Path]) -> Frames | None:
    return _products(files, {**AMAZON_ITEM, "category": ("category", pl.List(pl.String))}, pl.col("category"))
