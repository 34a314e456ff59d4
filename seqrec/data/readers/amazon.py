"""Amazon reviews of 2014, 2018 and 2023 with their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS, Frames
from seqrec.data.readers.csv_files import events
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.json_lines import json_lines, texts_of
from seqrec.data.readers.row_checks import Tables, tables, unescaped

AMAZON_ITEM = {"asin": "item_id", "title": "title", "brand": "brand"}


def amazon_2014(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews and Python-literal lines of metadata."""
    products = _products(files, AMAZON_ITEM | {"categories": "category"}, nested=True)
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
    names = {"parent_asin": "item_id", "title": "title", "store": "brand", "categories": "category"}
    return tables(files, events(files["interactions"], {"item_id": "parent_asin"}), _products(files, names))


def _reviews(files: Mapping[str, Path]) -> Frames:
    names = {"reviewerID": "user_id", "asin": "item_id", "overall": "rating", "unixReviewTime": "timestamp"}
    return texts_of(files["interactions"], names)


def _products(files: Mapping[str, Path], names: Mapping[str, str], *, nested: bool = False) -> Frames | None:
    """Return the metadata, if any; `names` maps its keys to ours; `nested` categories are lists of lists."""
    if "items" not in files:
        return None
    category, kind = pl.col("category"), pl.List(pl.String)
    if nested:
        category, kind = category.list.eval(pl.element().explode()), pl.List(kind)
    types = {key: kind if name == "category" else pl.String for key, name in names.items()}
    categories = category.list.join(", ").alias("category")
    # Some titles of the 2018 crawl are scripts of the page.
    title = pl.when(~pl.col("title").str.contains("getTime", literal=True)).then(pl.col("title"))
    return (
        frame.rename(names).select(*MARKS, "item_id", title, unescaped(pl.col("brand")), unescaped(categories))
        for frame in json_lines(files["items"], types)
    )


def _products_2018(files: Mapping[str, Path]) -> Frames | None:
    return _products(files, AMAZON_ITEM | {"category": "category"})
