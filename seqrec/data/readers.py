"""The formats of the sources, each read into the two canonical tables block by block.

A reader takes the files by role (`interactions`, `items`) and yields `Block`s: the good rows under our column names,
the bad ones with file, line and reason. Memory is bounded by the block, except for items. While a frame is on its way
it carries `_line` (1-based), `_text` (the record as published) and `_problem` (null where nothing is wrong so far).
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import html
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow.parquet as pq

from seqrec.config import IngestConfig

BLOCK_BYTES = 1 << 24
HEADER_BYTES = 1 << 16
BATCH_ROWS = 1 << 20  # of Parquet
LONGEST_LINE = 1 << 26  # more bytes without a line end are no text file, and must not fill the memory
LONGEST_QUOTED = 100  # lines with a quote that are tried as the end of a field opened earlier
MARKS = ("_line", "_text", "_problem")
TYPED = re.compile(r":(token|float|token_seq|float_seq)$")  # RecBole's atomic files type their headers
# At the end of a film's title; "(V)": straight to video; "(2007-2019)", "(2009– )": a series.
YEAR = r"\((\d{4})(?:\s*[-\x{2013}]\s*(?:\d{4})?\s*)?\)(?:\s*\(V\))?\s*$"
UNPRINTABLE = "\\p{Cc}|^[\u200b\ufeff]|[\u200b\ufeff]$"  # what people put into the names they choose
ENTITY = r"&(#\d+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);"
AMAZON_ITEM = {"asin": ("item_id", pl.String), "title": ("title", pl.String), "brand": ("brand", pl.String)}
ML_100K_GENRES = (
    *(
        "unknown",
        "Action",
        "Adventure",
        "Animation",
        "Children's",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
        "Fantasy",
    ),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


class DamagedFileError(ValueError):
    """A file is cut short or corrupt: fetching it again may help."""


class Block(NamedTuple):
    """Rows read together: `good` has our columns, `bad` those of the quarantine."""

    good: pl.DataFrame
    bad: pl.DataFrame


class Tables(NamedTuple):
    """What a reader returns; `items` is None where the source has no items file."""

    interactions: Iterator[Block]
    items: Iterator[Block] | None


Frames = Iterator[pl.DataFrame]
Reader = Callable[[Mapping[str, Path], IngestConfig], Tables]


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
    return _movielens(files, _events(files["interactions"], columns), _catalogue(files["items"], columns))


def recbole_100k(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read RecBole's `ml-100k.inter` and `ml-100k.item`."""
    columns = {"title": "movie_title", "year": "release_year", "genres": "class"}
    films = (
        frame.with_columns(
            pl.col("title").str.replace(r"\s*" + YEAR, ""),  # one title still has it
            pl.coalesce(pl.col("year").str.extract(r"^(\d{4})$"), pl.col("title").str.extract(YEAR)).alias("year"),
            pl.col("genres").str.replace_all(" ", ", ", literal=True),
        )
        for frame in _catalogue(files["items"], columns)
    )
    events = _events(files["interactions"], columns)
    return Tables(interactions(events, files["interactions"]), items(films, files["items"]))


def amazon_2014(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews and Python-literal lines of metadata."""
    categories = pl.List(pl.List(pl.String))
    flat = pl.col("category").list.eval(pl.element().explode())
    products = _products(files, {**AMAZON_ITEM, "categories": ("category", categories)}, flat, literals=True)
    return _amazon(files, _reviews(files, literals=True), products)


def amazon_2018(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews and of metadata."""
    return _amazon(files, _reviews(files), _products_2018(files))


def amazon_2018_ratings(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a CSV of ratings without a header (item, user, rating, time) and JSON lines of metadata."""
    ratings = delimited(files["interactions"], ("item_id", "user_id", "rating", "timestamp"), ",")
    return _amazon(files, ratings, _products_2018(files))


def amazon_2023(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a CSV of ratings (`parent_asin`, times in milliseconds) and JSON lines of metadata."""
    fields = {
        "parent_asin": ("item_id", pl.String),
        "title": ("title", pl.String),
        "store": ("brand", pl.String),
        "categories": ("category", pl.List(pl.String)),
    }
    products = _products(files, fields, pl.col("category"))
    return _amazon(files, _events(files["interactions"], {"item_id": "parent_asin"}), products)


def steam(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read Python-literal lines of reviews (dated by the day, users by the name they chose) and of games."""
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


def yelp(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read JSON lines of reviews (free text is skipped) and of businesses."""
    names = {"user_id": "user_id", "business_id": "item_id", "stars": "rating", "date": "timestamp"}
    lines = json_lines(files["interactions"], dict.fromkeys(names, pl.String))
    reviews = (frame.rename(names) for frame in lines)
    if "items" not in files:
        return Tables(interactions(reviews, files["interactions"]), None)
    texts = {"business_id": "item_id", "name": "title", "categories": "category", "city": "city"}
    lines = json_lines(files["items"], dict.fromkeys(texts, pl.String))
    businesses = (frame.rename(texts).select(*MARKS, *texts.values()) for frame in lines)
    return Tables(interactions(reviews, files["interactions"]), items(businesses, files["items"]))


def gowalla(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read check-ins (tabs: user, ISO time, latitude, longitude, place), latest first; places have no texts."""
    names = ("user_id", "timestamp", "latitude", "longitude", "item_id")
    return Tables(interactions(delimited(files["interactions"], names, "\t"), files["interactions"]), None)


def own_files(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read a user's tables, CSV (also TSV, RecBole's atomic files, gzip) or Parquet.

    `ingest.columns` maps our column names to the files'; `items.item_id` and the like hold for the items file alone.

    Raises:
        ValueError: a column is missing, or an entry of `ingest.columns` names a column of no file.
    """
    shared = {name: column for name, column in config.columns.items() if "." not in name}
    of_items = {**shared, **{name[6:]: col for name, col in config.columns.items() if name.startswith("items.")}}
    known = {column for role in ("interactions", "items") if role in files for column in header(files[role])}
    for name, column in config.columns.items():
        if column not in known:
            raise ValueError(f"ingest.columns.{name}: no file has a column {column!r}; there are {sorted(known)}")
    found = items(_catalogue(files["items"], of_items), files["items"]) if "items" in files else None
    return Tables(interactions(_events(files["interactions"], shared), files["interactions"]), found)


def growing_prefixes(files: Mapping[str, Path], config: IngestConfig) -> Tables:
    """Read `.inter` files whose rows are `user, history, next item`: the user's longest row is the sequence.

    A row that is no prefix of that sequence is bad: the histories were cut at a maximum length, and events are lost.
    Times are positions in the sequence (0, 1, ...). Where files `item2index` and `user2index` (id, number) lie beside
    them, the rows hold numbers, which become ids again.
    """
    indices = {f"{kind}_id": files[f"{kind}2index"] for kind in ("item", "user") if f"{kind}2index" in files}
    return Tables(
        _prefix_blocks([files[role] for role in ("train", "valid", "test")], indices),
        items(_catalogue(files["items"], {}), files["items"]) if "items" in files else None,
    )


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
    return Tables(interactions(ratings, files["interactions"]), items(films, files["items"]))


def _with_flagged_genres(frame: pl.DataFrame) -> pl.DataFrame:
    flags = [pl.when(pl.col(name) == "1").then(pl.lit(name)) for name in ML_100K_GENRES]
    return frame.select(
        *MARKS, "item_id", "title", pl.concat_str(flags, separator="|", ignore_nulls=True).alias("genres")
    )


def _amazon(files: Mapping[str, Path], events: Frames, products: Frames | None) -> Tables:
    found = items(products, files["items"]) if products is not None else None
    return Tables(interactions(events, files["interactions"]), found)


def _reviews(files: Mapping[str, Path], *, literals: bool = False) -> Frames:
    names = {"reviewerID": "user_id", "asin": "item_id", "overall": "rating", "unixReviewTime": "timestamp"}
    lines = json_lines(files["interactions"], dict.fromkeys(names, pl.String), literals=literals)
    return (frame.rename(names) for frame in lines)


def _products(
    files: Mapping[str, Path], fields: Mapping[str, tuple[str, Any]], category: pl.Expr, *, literals: bool = False
) -> Frames | None:
    """Return the metadata, if there is any; `fields` maps its keys to our names and polars types."""
    if "items" not in files:
        return None
    types = {key: kind for key, (_, kind) in fields.items()}
    names = {key: name for key, (name, _) in fields.items()}
    # The 2018 crawl has the page's script in place of some titles.
    title = pl.when(~pl.col("title").str.contains("getTime", literal=True)).then(pl.col("title"))
    return (
        frame.rename(names).select(
            *MARKS,
            "item_id",
            title,
            unescaped("brand"),
            category.list.join(", ").alias("category").pipe(unescaped),
        )
        for frame in json_lines(files["items"], types, literals=literals)
    )


def _products_2018(files: Mapping[str, Path]) -> Frames | None:
    return _products(files, {**AMAZON_ITEM, "category": ("category", pl.List(pl.String))}, pl.col("category"))


def read_lines(path: Path, *, encoding: str = "utf-8", quoted: bool = False, size: int = 0) -> Frames:
    """Yield the lines of a text file, plain or gzip, that are not blank.

    Bytes that are not `encoding` become U+FFFD. With `quoted`, a block does not end inside a quoted field. `size` is
    that of a block in bytes; 0: BLOCK_BYTES.

    Raises:
        DamagedFileError: the gzip stream is cut short or corrupt.
        ValueError: this is no text file.
    """
    for number, data in _chunks(path, quoted, size):
        yield _lines(data.decode(encoding, "replace"), number)


def _chunks(path: Path, quoted: bool, size: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, each with the number of its first line."""
    rest, number, marker = b"", 1, codecs.BOM_UTF8
    with opened(path) as stream:
        while chunk := _read(stream, path, size or BLOCK_BYTES):
            data = (rest + chunk).removeprefix(marker)
            marker = b""
            end = _last_line_end(data, quoted)
            if end == 0 and len(data) > LONGEST_LINE:
                raise ValueError(f"{path.name}: no line end in {len(data):,} bytes; this is no text file")
            rest = data[end:]
            if end:
                whole = data[:end]
                yield number, whole
                number += _count(whole, "\n")
    if rest:
        yield number, rest


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file, plain or gzip, for reading its content."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")


def _read(stream: gzip.GzipFile | io.BufferedReader, path: Path, size: int) -> bytes:
    try:
        return stream.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedFileError(f"{path.name} is truncated or damaged: {error}; fetch it again") from error


def _last_line_end(data: bytes, quoted: bool) -> int:
    end = data.rfind(b"\n") + 1
    if quoted and b'"' in data and data.count(b'"', 0, end) % 2:  # the last quote opened a field that goes on
        return data.rfind(b"\n", 0, data.rfind(b'"', 0, end)) + 1 or (end if len(data) > LONGEST_LINE else 0)
    return end


def _lines(text: str, number: int) -> pl.DataFrame:
    lines = pl.Series("_text", [text]).str.split("\n").explode().str.strip_suffix("\r")
    frame = pl.DataFrame([lines]).with_row_index("_line", offset=number)
    return frame.with_columns(pl.col("_line").cast(pl.Int64), pl.lit(None, pl.String).alias("_problem")).filter(
        pl.col("_text").str.strip_chars() != ""
    )


def delimited(
    path: Path, names: Sequence[str], delimiter: str, *, encoding: str = "utf-8", quoted: bool = False, skip: int = 0
) -> Frames:
    """Yield the records of a delimited file with one string column for each of `names`, after `skip` lines."""
    for number, data in _chunks(path, quoted):
        frame = _regular(data, number, names, delimiter, skip) if encoding == "utf-8" else None
        if frame is None:
            lines = _lines(data.decode(encoding, "replace"), number).filter(pl.col("_line") > skip)
            frame = _split_quoted(lines, names, delimiter) if quoted else _split(lines, names, delimiter)
        yield frame


def _count(data: bytes, text: str) -> int:
    """Return how often `text` occurs; that of one character several times faster than bytes.count."""
    if len(text) > 1:
        return data.count(text.encode())
    found = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 16  # stays in the cache
    return sum(int(np.count_nonzero(found[at : at + step] == ord(text))) for at in range(0, len(found), step))


def _regular(data: bytes, number: int, names: Sequence[str], delimiter: str, skip: int) -> pl.DataFrame | None:
    """Return the records of a block in which every line has all fields and none is quoted, several times faster.

    `_text` is a struct of the fields here, which costs nothing until it is asked for. None: the block is not like that.
    """
    if number <= skip:  # cut off what is above the records
        for _ in range(skip - number + 1):
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
        number = skip + 1
    lines = _count(data, "\n") + (not data.endswith(b"\n"))
    if not data or len(names) == 1 or b'"' in data or b"\xef\xbf\xbd" in data:
        return None
    if _count(data, delimiter) != lines * (len(names) - 1):
        return None
    if len(delimiter) > 1:
        if b"\t" in data:
            return None
        data = data.replace(delimiter.encode(), b"\t")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    try:  # raises where a line has too many fields; as the total is right, no line has too few then
        frame = pl.read_csv(
            data,
            has_header=False,
            separator=delimiter if len(delimiter) == 1 else "\t",
            quote_char=None,
            schema=dict.fromkeys(names, pl.String),
        )
    except pl.exceptions.PolarsError:
        return None
    if len(frame) != lines:
        return None
    if any(column.null_count() for column in frame):
        frame = frame.fill_null("")
    return frame.with_row_index("_line", offset=number).with_columns(
        pl.col("_line").cast(pl.Int64),
        pl.struct(pl.lit(delimiter).alias("_by"), *names).alias("_text"),
        pl.lit(None, pl.String).alias("_problem"),
    )


def _split(lines: pl.DataFrame, names: Sequence[str], delimiter: str) -> pl.DataFrame:
    fields = lines["_text"].str.split_exact(delimiter, len(names))
    frame = lines.with_columns(fields.struct.rename_fields([*names, "_excess"]).struct.unnest())
    missing, excess = pl.col(names[-1]).is_null(), pl.col("_excess").is_not_null()
    return frame.with_columns(
        pl.when(missing | excess).then(pl.lit(f"not {len(names)} columns")).alias("_problem")
    ).drop("_excess")


def _split_quoted(lines: pl.DataFrame, names: Sequence[str], delimiter: str) -> pl.DataFrame:
    """Split lines without a quote at once and the others one by one, so that a stray quote costs its own line only."""
    marked = lines["_text"].str.contains('"', literal=True).arg_true().to_list()
    if not marked:
        return _split(lines, names, delimiter)
    texts, numbers = lines["_text"].to_list(), lines["_line"].to_list()
    plain = np.ones(len(lines), dtype=bool)
    records: list[tuple[Any, ...]] = []
    last = -1
    for position, first in enumerate(marked):
        if first > last:
            last, fields = _quoted_record(texts, marked[position : position + LONGEST_QUOTED], delimiter)
            plain[first : last + 1] = False
            problem = (
                None
                if len(fields) == len(names)
                else "quotes do not match"
                if not fields
                else f"not {len(names)} columns"
            )
            values = fields if problem is None else [None] * len(names)
            records.append((numbers[first], "\n".join(texts[first : last + 1]), problem, *values))
    frame = _split(lines.filter(pl.Series(plain)), names, delimiter)
    return pl.concat([frame, pl.DataFrame(records, schema=frame.schema, orient="row")]).sort("_line")


def _quoted_record(texts: list[str], marked: list[int], delimiter: str) -> tuple[int, list[str]]:
    """Return the last line of the record that starts in line `marked[0]`, and its fields: none if it is malformed."""
    for last in marked:
        text = "\n".join(texts[marked[0] : last + 1])
        try:
            return last, next(csv.reader([text], delimiter=delimiter, strict=True))
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                break
    return marked[0], []


def json_lines(path: Path, fields: Mapping[str, Any], *, literals: bool = False) -> Frames:
    """Yield the objects of a file with one JSON object a line; `fields` maps the keys to read to their polars types.

    A missing key is null. With `literals`, a line may be a Python literal instead.
    """
    for lines in read_lines(path):
        values = _decoded(lines["_text"], fields)
        if values is not None:
            yield lines.with_columns(values.struct.unnest())
        else:  # at least one line is no JSON object of these types: find out which
            rows = [_parsed(text, fields, literals) for text in lines["_text"]]
            schema = {"_problem": pl.String, **fields}
            yield lines.drop("_problem").hstack(pl.DataFrame(rows, schema=schema, orient="row", strict=False))


def _decoded(texts: pl.Series, fields: Mapping[str, Any]) -> pl.Series | None:
    try:
        values = texts.str.json_decode(pl.Struct(dict(fields)))
    except pl.exceptions.PolarsError:
        return None
    return values if len(values) == len(texts) else None


def _parsed(text: str, fields: Mapping[str, Any], literals: bool) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _literal(text) if literals else None
    if not isinstance(value, dict):
        return [f"not a JSON object{' or Python literal' if literals else ''}", *[None] * len(fields)]
    return [None, *(_as_strings(value.get(name), kind) for name, kind in fields.items())]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _as_strings(value: Any, kind: Any) -> Any:
    if isinstance(kind, pl.List):
        return [_as_strings(part, kind.inner) for part in value] if isinstance(value, list) else None
    # A lone surrogate is legal JSON and no text.
    return None if value is None else str(value).encode("utf-8", "replace").decode("utf-8")


def header(path: Path) -> list[str]:
    """Return the column names of a CSV or Parquet file, without RecBole's types.

    Raises:
        ValueError: the file is empty, damaged, or names a column twice.
    """
    names = _parquet(path).schema_arrow.names if _is_parquet(path) else _csv_header(path)[0]
    if len(set(names)) < len(names):
        raise ValueError(f"{path.name}: a column name appears twice in {names}")
    return list(names)


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except ValueError as error:  # pyarrow.ArrowInvalid is one
        raise DamagedFileError(f"{path.name} is truncated or damaged: {error}; fetch it again") from error


def _csv_header(path: Path) -> tuple[list[str], str, bool, int]:
    """Return names, delimiter, whether fields may be quoted, and the header's line number."""
    for lines in read_lines(path, size=HEADER_BYTES):
        if lines.is_empty():  # a block of blank lines
            continue
        number, text = lines.row(0)[:2]
        delimiter = max(",\t;|", key=text.count)
        names = next(csv.reader([text], delimiter=delimiter))
        typed = all(TYPED.search(name) for name in names)
        return [TYPED.sub("", name.strip()) if typed else name.strip() for name in names], delimiter, not typed, number
    raise ValueError(f"{path.name} is empty")


def _frames(path: Path) -> Frames:
    names = header(path)
    if _is_parquet(path):
        yield from _parquet_frames(path)
    else:
        _, delimiter, quoted, number = _csv_header(path)
        yield from delimited(path, names, delimiter, quoted=quoted, skip=number)


def _parquet_frames(path: Path) -> Frames:
    number, readable = 1, (cs.numeric() | cs.string() | cs.temporal() | cs.boolean()) - cs.by_name("_line")
    for batch in _parquet(path).iter_batches(BATCH_ROWS):
        frame = pl.DataFrame(pl.from_arrow(batch)).with_row_index("_line", offset=number)
        number += len(frame)
        yield frame.with_columns(
            pl.col("_line").cast(pl.Int64),
            pl.concat_str(readable, separator=",", ignore_nulls=True).alias("_text"),
            pl.lit(None, pl.String).alias("_problem"),
        )


def _events(path: Path, columns: Mapping[str, str]) -> Frames:
    chosen = _chosen(path, ("user_id", "item_id", "timestamp"), ("rating",), columns)
    for frame in _frames(path):
        yield frame.select(*MARKS, **{name: pl.col(column) for name, column in chosen.items()})


def _catalogue(path: Path, columns: Mapping[str, str]) -> Frames:
    known = header(path)
    renamed = {column: name for name, column in columns.items() if column in known and name not in ("user_id",)}
    chosen = _chosen(path, ("item_id",), ("title",), columns)
    attributes = {renamed.get(column, column): column for column in known if column not in chosen.values()}
    for frame in _frames(path):
        yield frame.select(*MARKS, **{name: pl.col(column) for name, column in {**chosen, **attributes}.items()})


def _chosen(path: Path, required: Sequence[str], optional: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return our name -> the file's, for every column of ours that the file has."""
    known, chosen = header(path), {}
    for name in (*required, *optional):
        column = columns.get(name, name)
        column = column if column in known else name
        if column in known:
            chosen[name] = column
        elif name in required:
            raise ValueError(
                f"{path.name} has no column {columns.get(name, name)!r} but {known}: set ingest.columns.{name}"
            )
    return chosen


def _prefix_blocks(paths: Sequence[Path], indices: Mapping[str, Path]) -> Iterator[Block]:
    columns = {"history": "item_id_list"}
    frames = []
    for path in paths:
        chosen = _chosen(path, ("user_id", "item_id", "history"), (), columns)
        for frame in _frames(path):
            record = frame.select(*MARKS, **{name: pl.col(column) for name, column in chosen.items()})
            frames.append(record.with_columns(_record(record).alias("_text"), pl.lit(path.name).alias("_file")))
    rows = pl.concat(frames).with_columns(
        pl.col("user_id").str.strip_chars(),
        pl.concat_str("history", pl.lit(" "), "item_id")
        .str.strip_chars()
        .str.replace_all(r"\s+", " ")
        .alias("sequence"),
    )
    longest = pl.col("sequence").sort_by(pl.col("sequence").str.count_matches(" ", literal=True)).last().over("user_id")
    rows = rows.with_columns(longest.alias("longest"))
    cut = ~(pl.col("longest") + " ").str.starts_with(pl.col("sequence") + " ")
    problem = pl.when(cut).then(pl.lit("not a prefix of the user's longest sequence"))
    rows = rows.with_columns(pl.coalesce("_problem", problem).alias("_problem"))
    for (name,), bad in rows.filter(pl.col("_problem").is_not_null()).group_by("_file", maintain_order=True):
        yield Block(_NO_EVENTS, _quarantined(bad, str(name)))
    sequences = rows.filter(pl.col("_problem").is_null()).unique("user_id", keep="first", maintain_order=True)
    events = sequences.select("user_id", pl.col("longest").str.split(" ").alias("item_id"))
    events = events.with_columns(pl.int_ranges(pl.col("item_id").list.len()).alias("timestamp"))
    events = (
        events.explode("item_id", "timestamp")
        .with_row_index("_line", offset=1)
        .with_columns(
            pl.col("_line").cast(pl.Int64),
            pl.col("item_id").alias("_text"),
            pl.lit(None, pl.String).alias("_problem"),
        )
    )
    for column, path in indices.items():
        with opened(path) as file:
            index = pl.read_csv(
                file.read(), separator="\t", has_header=False, new_columns=["_id", column], infer_schema=False
            )
        events = events.join(index, on=column, how="left", maintain_order="left")
        unknown = pl.when(pl.col("_id").is_null()).then(pl.lit(f"{column} is not in {path.name}"))
        events = events.with_columns(pl.coalesce("_problem", unknown).alias("_problem"), pl.col("_id").alias(column))
        events = events.drop("_id")
    yield from interactions(iter([events]), paths[0])


def interactions(frames: Iterable[pl.DataFrame], path: Path) -> Iterator[Block]:
    """Check and type events: columns `user_id`, `item_id`, `timestamp`, perhaps `rating`, of any type."""
    for frame in frames:
        rating = (
            frame["rating"] if "rating" in frame.columns else pl.repeat(None, len(frame), dtype=pl.String, eager=True)
        )
        frame = frame.with_columns(
            _identifier(frame["user_id"]),
            _identifier(frame["item_id"]),
            seconds(frame["timestamp"]).alias("_seconds"),
            rating.cast(pl.Float32, strict=False).alias("_rating"),
        )
        bad = frame.clear()
        if not _clean(frame):
            frame = _with_problems(frame, rating)
            bad = frame.filter(pl.col("_problem").is_not_null())
            frame = frame.filter(pl.col("_problem").is_null())
        good = frame.select(
            "user_id",
            "item_id",
            pl.col("_seconds").alias("timestamp"),
            pl.col("_line").alias("row"),
            pl.col("_rating").alias("rating"),
        )
        yield Block(good, _quarantined(bad, path.name))


def _clean(frame: pl.DataFrame) -> bool:
    """Return whether nothing can be wrong with any row, which is cheaper to see than what is wrong with each."""
    times, ratings = frame["_seconds"], frame["_rating"]
    return (
        frame["_problem"].null_count() == len(frame) > 0
        and not any(frame[name].null_count() for name in ("user_id", "item_id", "_seconds", "_rating"))
        and int(times.min()) >= 0  # type: ignore[arg-type]
        and bool(ratings.is_finite().all())
        and all(frame[name].str.len_bytes().min() for name in ("user_id", "item_id"))
        and (  # `_regular` has looked
            isinstance(frame.schema["_text"], pl.Struct)
            or not any(frame[name].str.contains("\ufffd", literal=True).any() for name in ("user_id", "item_id"))
        )
    )


def _with_problems(frame: pl.DataFrame, rating: pl.Series) -> pl.DataFrame:
    # A column of dates or numbers has no text that could be blank.
    blanks = {"_no_time": _blank(frame["timestamp"]), "_rated": ~_blank(rating)}
    problem = (
        pl.when(pl.col("_no_time"))
        .then(pl.lit("no timestamp"))
        .when(pl.col("_seconds").is_null())
        .then(pl.lit("timestamp is neither a number nor an ISO time"))
        .when(pl.col("_seconds") < 0)
        .then(pl.lit("timestamp is negative"))
        .when(pl.col("_rated") & ~pl.col("_rating").is_finite().fill_null(False))
        .then(pl.lit("rating is not a number"))
    )
    return frame.with_columns(**blanks).with_columns(
        pl.coalesce("_problem", _id_problem("user_id"), _id_problem("item_id"), problem).alias("_problem")
    )


def items(frames: Iterable[pl.DataFrame], path: Path) -> Iterator[Block]:
    """Check items: column `item_id`, perhaps `title`, any attributes; all become stripped text, blanks become null."""
    for frame in frames:
        texts = [name for name in frame.columns if name not in (*MARKS, "item_id", "title")]
        title = frame["title"] if "title" in frame.columns else pl.Series([None] * len(frame), dtype=pl.String)
        frame = frame.select(
            *MARKS,
            _identifier(frame["item_id"]),
            _cleaned(title.alias("title")),
            *(_cleaned(frame[name]) for name in texts),
        ).with_columns(unescaped("title"))
        frame = frame.with_columns(pl.coalesce("_problem", _id_problem("item_id")).alias("_problem"))
        yield Block(
            frame.filter(pl.col("_problem").is_null()).drop(MARKS),
            _quarantined(frame.filter(pl.col("_problem").is_not_null()), path.name),
        )


def seconds(times: pl.Series) -> pl.Series:
    """Return int64 seconds since 1970, UTC; null where a value is no time.

    Numbers are epoch seconds, milliseconds, microseconds or nanoseconds by their size (1e11 s is the year 5138). Text
    is such a number or an ISO 8601 time; one without an offset is UTC.
    """
    if times.dtype in (pl.Date, pl.Datetime):
        return times.cast(pl.Datetime("us")).dt.epoch("s")
    if times.dtype == pl.String:
        times = times.str.strip_chars()
    whole = (
        times.cast(pl.Int64, strict=False)
        if not times.dtype.is_float()
        else pl.Series(dtype=pl.Int64).extend_constant(None, len(times))
    )
    if whole.null_count():
        fraction = times.cast(pl.Float64, strict=False)
        fraction = fraction.set(~fraction.is_finite().fill_null(True), None)
        whole = whole.fill_null(fraction.floor().cast(pl.Int64, strict=False))
    t = pl.col("t")
    micro_or_nano = pl.when(t >= 10**17).then(t // 10**9).otherwise(t // 10**6)
    scaled = pl.when(t >= 10**14).then(micro_or_nano).when(t >= 10**11).then(t // 10**3).otherwise(t)
    whole = pl.DataFrame({"t": whole}).select(scaled).to_series()
    return whole.fill_null(_iso_seconds(times)) if times.dtype == pl.String and whole.null_count() else whole


def _iso_seconds(times: pl.Series) -> pl.Series:
    text = times.str.replace(r"^(\d{4}-\d\d-\d\d) ", "${1}T").str.replace("[zZ]$", "+00:00")
    parsed = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%:z", strict=False, time_unit="us", time_zone="UTC").dt.epoch(
        "s"
    )
    for pattern in ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M"):
        parsed = parsed.fill_null(text.str.to_datetime(pattern, strict=False, time_unit="us").dt.epoch("s"))
    return parsed.fill_null(text.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("us")).dt.epoch("s"))


def unescaped(column: str | pl.Expr) -> pl.Expr:
    """Replace HTML entities that end in `;`, so that a bare `&` stays what it is."""
    expression = pl.col(column) if isinstance(column, str) else column
    replaced = expression.map_elements(_unescape, return_dtype=pl.String, skip_nulls=True)
    return pl.when(expression.str.contains(ENTITY)).then(replaced).otherwise(expression)


def _unescape(text: str) -> str:
    return re.sub(ENTITY, lambda match: html.unescape(match[0]), text)


def _identifier(ids: pl.Series) -> pl.Series:
    if ids.dtype.is_float():  # whole numbers that pandas made floats because one is missing
        ids = pl.select(pl.when(ids == ids.floor()).then(ids)).to_series().cast(pl.Int64, strict=False).alias(ids.name)
    return ids.cast(pl.String).str.strip_chars()


def _id_problem(name: str) -> pl.Expr:
    column = pl.col(name)
    return (
        pl.when(column.is_null() | (column == ""))
        .then(pl.lit(f"no {name}"))
        .when(column.str.contains("\ufffd", literal=True))
        .then(pl.lit(f"{name} is not UTF-8"))
    )


def _blank(values: pl.Series) -> pl.Series:
    return values.is_null() if values.dtype != pl.String else (values.str.strip_chars() == "").fill_null(True)


def _cleaned(values: pl.Series) -> pl.Series:
    if isinstance(values.dtype, pl.List):
        values = values.cast(pl.List(pl.String)).list.join(", ")
    values = values.cast(pl.String).str.strip_chars()
    return values.set(values == "", None)


def _quarantined(bad: pl.DataFrame, name: str) -> pl.DataFrame:
    return bad.select(
        pl.lit(name).alias("file"),
        pl.col("_line").alias("line"),
        pl.col("_problem").alias("reason"),
        _record(bad).str.slice(0, 500).alias("text"),
    )


def _record(frame: pl.DataFrame) -> pl.Expr:
    """Return the text of each record, put together again where only its fields are there."""
    kind, text = frame.schema["_text"], pl.col("_text")
    if not isinstance(kind, pl.Struct) or frame.is_empty():
        return text.cast(pl.String)
    fields = [text.struct.field(field.name) for field in kind.fields[1:]]
    return pl.concat_str(fields, separator=frame["_text"][0]["_by"])


_NO_EVENTS = pl.DataFrame(
    schema={"user_id": pl.String, "item_id": pl.String, "timestamp": pl.Int64, "row": pl.Int64, "rating": pl.Float32}
)
