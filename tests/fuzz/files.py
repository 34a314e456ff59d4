"""Strategies that make damaged files out of good ones."""

from __future__ import annotations

import gzip
from collections.abc import Mapping

from hypothesis import strategies as st

NASTY = [
    *(b'"', b'""', b'"""', b'u1",5,"yzzz', b'",', b',"', b"'", b"\\"),
    *(b"\r", b"\n", b"\r\n", b"\n\n", b"\x00", b"\x1a", b"\x0b", b"\x85", b"\xe2\x80\xa8", b" ", b"\t", b"\xc2\xa0"),
    *(b"\xff", b"\xe9", b"\xed\xa0\x80", b"\xef\xbf\xbd", b"\xef\xbb\xbf", b"\xff\xfe", b"\xf0\x9f\x98\x80"),
    *(b",", b"::", b":", b"|", b";", b",,,,,,,,", b"\t\t"),
    *(b"_line", b"_by", b"_text", b"_problem", b"_excess", b"user_id", b"item_id", b"timestamp", b"title", b"text"),
    *(b"nan", b"inf", b"-1", b"1e400", b"1e18", b"9" * 400, b"-0", b"0x10", b"1_000", b"true", b"null", b"None"),
    *(b"9999-12-31", b"0000-00-00", b"+262143-01-01", b"2020-02-30T25:61:61Z", b"1969-12-31", b"2020-01-01T00:00+99"),
    *(b'"\\ud83d"', b"\\ud83d", b"\\u0000", b"&#0;", b"&#xD800;", b"&#1114112;", b"&" + b"#" + b"9" * 5000 + b";"),
    *(b"{", b"}", b"[" * 300, b"{'a':" * 300, b"[]", b"{}", b"-" * 3000 + b"1", b"1+" * 3000, b"0x" + b"f" * 5000),
    *(b"z" * 140_000, b"a,b\n" * 2000, b'"\n' * 2000, b"<!DOCTYPE html>", b"PAR1", b"PK\x03\x04", b"\x1f\x8b"),
]
TOKENS = st.integers(0, len(NASTY) - 1).map(NASTY.__getitem__)  # sampled_from would print them all
WHOLE = {  # what programs do to a whole file
    "as it is": lambda data: data,
    "carriage returns": lambda data: data.replace(b"\n", b"\r"),
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "utf-16": lambda data: data.decode("utf-8", "replace").encode("utf-16"),
    "marked": lambda data: b"\xef\xbb\xbf" + data,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "cut gzip": lambda data: gzip.compress(data, mtime=0)[:-9],
    "gzip and garbage": lambda data: gzip.compress(data, mtime=0) + b"garbage",
    "empty": lambda data: b"",
}
EDITS = ("insert", "insert", "replace", "delete", "double a line", "drop a line", "cut", "change a line")


def edited(data: bytes, edit: str, where: int, token: bytes) -> bytes:
    """Return `data` changed in one place; `where` is in thousandths."""
    at = len(data) * where // 1000
    begin = data.rfind(b"\n", 0, at) + 1
    end = data.find(b"\n", at) + 1 or len(data)
    return {
        "insert": data[:at] + token + data[at:],
        "replace": data[:at] + token + data[at + max(1, len(token) % 50) :],
        "delete": data[:at] + data[at + len(token) % 50 + 1 :],
        "double a line": data[:begin] + 2 * data[begin:end] + data[end:],
        "drop a line": data[:begin] + data[end:],
        "change a line": data[:begin] + token + data[end - 1 :],
        "cut": data[:at],
    }[edit]


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Return `good` with up to four edits, and perhaps as another program would have written it."""
    data = good
    for _ in range(draw(st.integers(0, 4))):
        token = draw(TOKENS | st.binary(max_size=8))
        data = edited(data, draw(st.sampled_from(EDITS)), draw(st.integers(0, 1000)), token)
    return WHOLE[draw(st.sampled_from(["as it is"] * 6 + list(WHOLE)))](data)


@st.composite
def damaged_files(draw: st.DrawFn, good: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files by role, one of them damaged, or all."""
    chosen = draw(st.sampled_from([*good, ""]))
    return {role: draw(damaged(data)) if chosen in (role, "") else data for role, data in good.items()}
