"""Gowalla check-ins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seqrec.config import IngestConfig
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.row_checks import Tables, interactions


def gowalla(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read check-ins (tabs: user, ISO time, latitude, longitude, place), latest first; places have no texts."""
    names = ("user_id", "timestamp", "latitude", "longitude", "item_id")
    return Tables(interactions(delimited(files["interactions"], names, "\t"), files["interactions"]), None)
