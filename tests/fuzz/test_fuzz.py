"""A few inputs for every target, files that were once too much, and what must hold for every damaged file."""

import gzip
import itertools
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fuzz.files import TOKENS
from fuzz.harness import Target, attempt
from fuzz.model_targets import MODELS
from fuzz.reader_targets import FORMATS, READERS, read
from fuzz.setting_targets import SETTINGS

FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
EVENTS = b"user_id,item_id,timestamp\n"
TARGETS = {target.name: target for target in (*READERS, *SETTINGS, *MODELS)}

# of each target, here and in `make fuzz`; processes of pytest-xdist share the minutes
MINUTES = float(os.environ.get("FUZZ_MINUTES", 0)) * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) / len(TARGETS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_input_ends_in_a_traceback(target, tmp_path):
    """One round of inputs, and more of them until the minutes of `make fuzz` are over."""
    end = time.monotonic() + 60 * MINUTES
    for number in itertools.count():

        @seed(number)
        @settings(FEW, max_examples=200 if MINUTES else 12)
        @given(target.inputs)
        def search(value):
            (tmp_path / "input").write_text(repr(value), errors="backslashreplace")  # if the process dies of it
            assert attempt(target, value) in (True, False)  # it raises whatever is not a clear error

        search()
        if time.monotonic() >= end:
            break


WIDE = b'u1",5,"y' + b"z" * 200 + b"\n"
CORPUS = {  # name -> events file, and the rows that are read; None: one clear error
    "carriage returns": (b"user_id,item_id,timestamp\ru,i,5\rw,i,6\r", 2),
    "a header longer than the csv module allows": (EVENTS[:-1] + b"," + b"h" * 140_000 + b"\nu,i,5,\n", 1),
    "a header in quotes that do not match": (b'"user_id,item_id,timestamp\nu,i,5\n', None),
    "a column called _line": (b"user_id,item_id,timestamp,_line\nu,i,5,1\n", None),
    "stray quotes": (EVENTS + b"u,i,5\n" + WIDE * 3000 + b"w,i,6\n", 2),
    "quotes that never end": (EVENTS + b'u,"i,5\n' * 3000 + b"w,i,6\n", 1),
    "a long field in quotes": (EVENTS + b'u,"' + b"i" * 1_000_000 + b'",5\n', None),
    "two quotes that make one record of many lines": (EVENTS + b'u,"i,5\n' + b"u,i,5\n" * 40 + b'u,i",5\n', None),
    "two quotes too far apart for that": (EVENTS + b'u,"i,5\n' + b"u,i,5\n" * 1000 + b'u,i",5\n', 1001),
    "many columns": (b",".join(b"c%d" % n for n in range(200_000)) + b"\n", None),
    "many empty columns": (b"," * 500_000 + b"\n", None),
    "no line ends": (b"z" * (1 << 20), None),
    "utf-16": ("user_id,item_id,timestamp\nu,i,5\n".encode("utf-16"), None),
    "a web page": (b"<!DOCTYPE html>\n<html>not found</html>\n", None),
    "an empty gzip": (gzip.compress(b""), None),
}


@pytest.mark.parametrize("name", CORPUS)
def test_a_file_that_was_once_too_much(name):
    data, rows = CORPUS[name]
    counts = {}
    target = Target(name, st.none(), lambda files: counts.update(read("csv", files)))
    refused = attempt(target, {"interactions": data})
    assert refused == (rows is None)
    assert counts.get("rows") == rows


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.string()), pa.struct([("x", pa.int64())]), pa.map_(pa.string(), pa.int8())]
)
def test_nested_parquet_columns_are_named(tmp_path, kind):
    columns = {"user_id": pa.array([None], type=kind), "item_id": ["i"], "timestamp": [5]}
    pq.write_table(pa.table(columns), tmp_path / "e")
    with pytest.raises(ValueError, match=r"column 'user_id' holds"):
        read("csv", {"interactions": (tmp_path / "e").read_bytes()})


@pytest.mark.parametrize(
    ("kind", "good", "most"),
    [
        (pa.date32(), 20_000, 2**31 - 1),
        (pa.date64(), 20_000 * 86_400_000, 2**63 - 1),
        (pa.timestamp("s"), 1_700_000_000, (2**63 - 1) // 1000),
        (pa.timestamp("ms"), 1_700_000_000 * 10**3, 2**63 - 1),
        (pa.timestamp("us"), 1_700_000_000 * 10**6, 2**63 - 1),
        (pa.timestamp("ns"), 1_700_000_000 * 10**9, 2**63 - 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("column", ["user_id", "timestamp"])
def test_dates_out_of_range_are_quarantined(kind, good, most, column):
    raw = pa.int32() if kind == pa.date32() else pa.int64()
    plain = {"user_id": ["u", "v", "w"], "item_id": ["i", "j", "k"], "timestamp": [5, 6, 7]}
    columns = {**plain, column: pa.array([good, most, most - 1], type=raw).view(kind)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)

    counts = read("csv", {"interactions": sink.getvalue().to_pybytes()})

    wrong = 0 if str(kind) == "timestamp[ns]" else 2  # nanoseconds end in the year 2262, which is a date
    assert (counts["rows"], counts["quarantined"]) == (3 - wrong, wrong)


LINES = {  # format -> one line of user u and item i
    "csv": "u%d,i%d,5,1\n",
    "ml-100k": "u%d\ti%d\t3\t5\n",
    "ml-1m": "u%d::i%d::3::5\n",
    "amazon-2018": '{"reviewerID": "u%d", "asin": "i%d", "unixReviewTime": 5}\n',
    "steam": "{'username': 'u%d', 'product_id': 'i%d', 'date': '2017-12-17'}\n",
    "lines": "u%d i%d j k\n",
}


@pytest.mark.parametrize("name", LINES)
@FEW
@given(st.data())
def test_a_bad_line_costs_no_other_line(name, data):
    """Nine good lines, one of which is replaced; what it is replaced by has no line end."""
    nasty = data.draw(TOKENS | st.binary(max_size=20), label="line")
    nasty = nasty.replace(b"\n", b"").replace(b"\r", b"")
    place = data.draw(st.integers(1, 8), label="place")
    good = [(LINES[name] % (n, n)).encode() for n in range(9)]
    head = b"user_id,item_id,timestamp,rating\n" if name == "csv" else b""
    files = {"interactions": head + b"".join([*good[:place], nasty + b"\n", *good[place + 1 :]])}
    files |= {role: text for role, text in FORMATS[name][1].items() if role == "items"}
    counts = read(name, files)
    events = 3 if name == "lines" else 1
    assert counts["rows"] >= 8 * events
    assert counts["rows"] + counts["quarantined"] >= 8 * events + bool(
        nasty.strip(b" \t\x0b\x85\xa0\xc2\xe2\x80\xa8\x1a")
    )
