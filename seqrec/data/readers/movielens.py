"""MovieLens: 100K, 1M, 10M, and the CSV of latest-small to 32M."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from seqrec.config import IngestConfig
from seqrec.data.readers.blocks import MARKS, Frames
from seqrec.data.readers.csv_files import catalogue, events
from seqrec.data.readers.delimited import delimited
from seqrec.data.readers.row_checks import Tables, tables

# At the end of a film's title; "(V)": straight to video; "(2007-2019)", "(2009– )": a series.
YEAR = r"\((\d{4})(?:\s*[-\x{2013}]\s*(?:\d{4})?\s*)?\)(?:\s*\(V\))?\s*$"
ML_100K_GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    "Fantasy",
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def movielens_100k(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `u.data` (tabs) and `u.item` (`|`, latin-1, one flag a genre)."""
    ratings = delimited(files["interactions"], ("user_id", "item_id", "rating", "timestamp"), "\t")
    names = ("item_id", "title", "released", "video", "url", *ML_100K_GENRES)
    films = (_with_flagged_genres(frame) for frame in delimited(files["items"], names, "|", encoding="latin-1"))
    return _movielens(files, ratings, films)


def movielens_1m(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `ratings.dat` and `movies.dat` (`::`, latin-1)."""
    ratings = delimited(files["interactions"], ("user_id", "item_id", "rating", "timestamp"), "::")
    films = delimited(files["items"], ("item_id", "title", "genres"), "::", encoding="latin-1")
    return _movielens(files, ratings, films)


def movielens_10m(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `ratings.dat` and `movies.dat` (`::`, UTF-8, half stars)."""
    ratings = delimited(files["interactions"], ("user_id", "item_id", "rating", "timestamp"), "::")
    return _movielens(files, ratings, delimited(files["items"], ("item_id", "title", "genres"), "::"))


def movielens_latest(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `ratings.csv` and `movies.csv` (header, quoted titles): latest-small, 20M, 25M and 32M."""
    columns = {"user_id": "userId", "item_id": "movieId"}
    return _movielens(
        files,
        events(files["interactions"], columns),
        catalogue(files["items"], columns, ("item_id", "title", "genres")),
    )


def recbole_100k(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read RecBole's `ml-100k.inter` and `ml-100k.item`."""
    columns = {"title": "movie_title", "year": "release_year", "genres": "class"}
    films = (
        frame.with_columns(
            pl.col("title").str.replace(r"\s*" + YEAR, ""),  # one title still has it
            pl.coalesce(pl.col("year").str.extract(r"^(\d{4})$"), pl.col("title").str.extract(YEAR)).alias("year"),
            pl.col("genres").str.replace_all(" ", ", ", literal=True),
        )
        for frame in catalogue(files["items"], columns, ("item_id", "title", "year", "genres"))
    )
    return tables(files, events(files["interactions"], columns), films)


def _movielens(files: Mapping[str, Path], ratings: Frames, films: Frames) -> Tables:
    genres = pl.when(pl.col("genres") != "(no genres listed)").then(
        pl.col("genres").str.replace_all("|", ", ", literal=True)
    )
    films = (
        frame.select(
            *MARKS,
            "item_id",
            pl.col("title").str.replace(r"\s*" + YEAR, ""),
            pl.col("title").str.extract(YEAR).alias("year"),
            genres.alias("genres"),
        )
        for frame in films
    )
    return tables(files, ratings, films)


def _with_flagged_genres(frame: pl.DataFrame) -> pl.DataFrame:
    flags = [pl.when(pl.col(name) == "1").then(pl.lit(name)) for name in ML_100K_GENRES]
    return frame.select(
        *MARKS, "item_id", "title", pl.concat_str(flags, separator="|", ignore_nulls=True).alias("genres")
    )
