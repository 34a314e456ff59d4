"""Yelp reviews and businesses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS
from seqrec.data.readers.json_lines import json_lines
from seqrec.data.readers.row_checks import Tables, interactions, items


def yelp(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews, without their text, and of businesses."""
    names = {"user_id": "user_id", "business_id": "item_id", "stars": "rating", "date": "timestamp"}
    lines = json_lines(files["interactions"], dict.fromkeys(names, pl.String))
    reviews = (frame.rename(names) for frame in lines)
    if "items" not in files:
        return Tables(interactions(reviews, files["interactions"]), None)
    texts = {"business_id": "item_id", "name": "title", "categories": "category", "city": "city"}
    lines = json_lines(files["items"], dict.fromkeys(texts, pl.String))
    businesses = (frame.rename(texts).select(*MARKS, *texts.values()) for frame in lines)
    return Tables(interactions(reviews, files["interactions"]), items(businesses, files["items"]))
