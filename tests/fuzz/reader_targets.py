"""The readers of every format, through what the ingest stage does with their blocks."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from fuzz.files import TOKENS, damaged, damaged_files
from fuzz.harness import Target
from seqrec.config import IngestConfig
from seqrec.data import readers
from seqrec.data.download import SourceFile
from seqrec.data.sources import Publication
from seqrec.stages.ingest import _write_tables

FLAGS = "|".join("01" + "0" * 17)
FILM = f"|T (1995)|01-Jan-1995||http://x|{FLAGS}\n"
REVIEW = '{"reviewerID": "u%d", "asin": "i%d", "overall": 5.0, "unixReviewTime": 1252800000}\n'
HISTORY = "user_id:token\titem_id_list:token_seq\titem_id:token\n"


def lines(form: str, count: int = 6) -> bytes:
    """Return lines of users u0, u1, ... and items i0, i1, ...; `form` has a place for both."""
    return "".join(form % (n, n % 3) for n in range(count)).encode()


# format -> reader, and good files by role; formats that are left out consist of parts of these
FORMATS: dict[str, tuple[Callable[..., readers.Tables], dict[str, bytes]]] = {
    "csv": (
        readers.own_files,
        {
            "interactions": b"user_id,item_id,timestamp,rating\n" + lines('u%d,"i%d",1577836801,4.5\n'),
            "items": b'item_id,title,tags\ni0,"One, ""two""",x\ni1,"two\nlines",\ni2,&lt;3,y\n',
        },
    ),
    "csv-columns": (
        readers.own_files,
        {
            "interactions": b"who;what;when\n" + lines("u%d;i%d;31/01/2020 23:59\n"),
            "items": b"item_id;colour\ni0;red\n",
        },
    ),
    "ml-100k": (
        readers.movielens_100k,
        {"interactions": lines("%d\t%d\t3\t881250949\n"), "items": f"0{FILM}1{FILM}2{FILM}".encode("latin-1")},
    ),
    "ml-1m": (
        readers.movielens_1m,
        {"interactions": lines("%d::%d::3::978300760\n"), "items": b"0::\xc9t\xe9 (1977)::Drama\n"},
    ),
    "amazon-2014": (
        readers.amazon_2014,
        {"interactions": lines(REVIEW), "items": b"{'asin': 'i0', 'title': 'It\\'s', 'categories': [['A'], ['B']]}\n"},
    ),
    "amazon-2018": (
        readers.amazon_2018,
        {"interactions": lines(REVIEW), "items": b'{"asin": "i0", "title": "R&amp;B", "category": ["a"]}\n'},
    ),
    "steam": (
        readers.steam,
        {
            "interactions": lines("{u'username': u'u%d', u'product_id': u'i%d', u'date': u'2017-12-17'}\n"),
            "items": b"{u'id': u'i0', u'app_name': u'T', u'genres': [u'Action', u'Indie']}\n",
        },
    ),
    "prefixes": (
        readers.growing_prefixes,
        {
            "train": HISTORY.encode() + b"0\t0\t1\n1\t0\t2\n",
            "valid": HISTORY.encode() + b"0\t0 1\t2\n",
            "test": HISTORY.encode() + b"0\t0 1 2\t0\n",
            "items": b"item_id:token\ttext:token_seq\nB9\tSalt. Home.\n",
            "item2index": b"B9\t0\nB7\t1\nB8\t2\n",
            "user2index": b"ANN\t0\nBOB\t1\n",
        },
    ),
    "lines": (readers.lines_of_items, {"interactions": lines("u%d i%d i7 i8\n")}),
    "lines-pairs": (
        readers.lines_of_items,
        {"interactions": b"u0 i0\nu1 i0\nu0 i1\nu0 i2\nu1 i2\n", "items": b"item_id,title\ni0,One\n"},
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "csv-columns": {
        "columns": {"user_id": "who", "item_id": "what", "timestamp": "when", "hue": "colour"},
        "time_format": "%d/%m/%Y %H:%M",
    },
    "lines-pairs": {"lines": "pairs"},
}


def read(name: str, files: Mapping[str, bytes]) -> dict[str, int]:
    """Write the files, read them and write the tables; return the counts."""
    reader, _ = FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for role, data in files.items():
            path = Path(folder, f"{role}.file")
            path.write_bytes(data)
            found[role] = SourceFile(role, path, role)
        config = IngestConfig(source="csv", max_bad_share=1.0, **SETTINGS.get(name, {}))
        return _write_tables(Path(folder), Publication(files=(), read=reader), found, config, None)


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [1, -1, 127]),
    (pa.int64(), [1577836801, -(2**63), 2**63 - 1]),
    (pa.uint64(), [2**64 - 1, 0, 1577836801999]),
    (pa.float32(), [1.5, float("nan"), float("inf")]),
    (pa.float64(), [1577836801.5, 1e300, -0.0]),
    (pa.bool_(), [True, False, True]),
    (pa.string(), ["u", "", "\x00"]),
    (pa.large_string(), ["2020-01-01", "1", "\U0001f600"]),
    (pa.string_view(), ["u", "v", "a longer text than fits inline"]),
    (pa.binary(), [b"u", b"\xff\xfe", b""]),
    (pa.binary(2), [b"uu", b"\xff\xfe", b"ab"]),
    (pa.date32(), [date(2020, 1, 1), date(1, 1, 1), date(9999, 12, 31)]),
    (pa.date64(), [date(2020, 1, 1), date(1, 1, 1), date(9999, 12, 31)]),
    (pa.timestamp("s"), [0, 2**53, -(2**53)]),
    (pa.timestamp("ms", "Asia/Tokyo"), [1577836801999, 2**62, -(2**62)]),
    (pa.timestamp("us", "+05:30"), [1577836801999999, 2**62, 0]),
    (pa.timestamp("ns", "Nowhere/Nowhere"), [1577836801999999999, 0, 1]),
    (pa.time32("s"), [0, 1, 86399]),
    (pa.time64("ns"), [0, 1, 86399 * 10**9]),
    (pa.duration("us"), [timedelta(seconds=1), timedelta(days=-1), timedelta(0)]),
    (pa.decimal128(38, 2), [Decimal("1.25"), Decimal(10) ** 35, Decimal(-1)]),
    (pa.decimal256(70, 0), [Decimal(1), Decimal(10) ** 60, Decimal(-1)]),
    (pa.null(), [None, None, None]),
    (pa.list_(pa.string()), [["a", None], [], None]),
    (pa.list_(pa.list_(pa.int64())), [[[1], None], [], [[]]]),
    (pa.list_(pa.float32(), 2), [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]),
    (pa.struct([("x", pa.int64())]), [{"x": 1}, {"x": None}, None]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [], None]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"]),
]
NAMES = ["user_id", "item_id", "timestamp", "rating", "title", "_line", "_by", "tags", "", "a.b"]


@st.composite
def parquet(draw: st.DrawFn, names: list[str]) -> bytes:
    """Return a Parquet file whose columns have any types, perhaps damaged."""
    count = draw(st.integers(0, 3))
    names = [*names, *draw(st.lists(st.sampled_from(NAMES), max_size=2))]
    arrays = []
    for _ in names:
        kind, values = draw(st.sampled_from(VALUES))
        nulls = draw(st.lists(st.booleans(), min_size=3, max_size=3))
        chosen = [None if null else value for null, value in zip(nulls, values, strict=True)]
        arrays.append(pa.array(chosen[:count], type=kind))
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=names), stream)
    data = stream.getvalue()
    return draw(damaged(data)) if draw(st.integers(0, 3)) == 0 else data


@st.composite
def parquet_files(draw: st.DrawFn) -> dict[str, bytes]:
    """Return both files of a user's own tables as Parquet."""
    return {
        "interactions": draw(parquet(["user_id", "item_id", "timestamp"])),
        "items": draw(parquet(["item_id", "title"])),
    }


def garbage() -> st.SearchStrategy[bytes]:
    """Return files that were never good."""
    return st.binary(max_size=300) | st.lists(TOKENS, max_size=12).map(b"".join)


def _target(name: str) -> Target:
    good = FORMATS[name][1]
    anything = st.fixed_dictionaries(dict.fromkeys(good, garbage()))
    run = partial(read, name)
    return Target(f"read-{name}", st.one_of(damaged_files(good), damaged_files(good), anything), run)


READERS = [
    *(_target(name) for name in FORMATS),
    Target("read-parquet", parquet_files(), partial(read, "csv")),
]
