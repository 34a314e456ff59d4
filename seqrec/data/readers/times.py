"""Converts times in any published format to seconds since 1970, UTC."""

from __future__ import annotations

import polars as pl

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # units of times
DAY_S = 86_400
ISO = (
    *("%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M%#z", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H"),
    "%Y-%m-%d",
)
LARGEST_SECONDS = 10**11  # in the year 5138; larger numbers are milliseconds or finer


def seconds(times: pl.Series, time_format: str = "") -> pl.Series:
    """Return int64 seconds since 1970, UTC; null for invalid times.

    Numbers are seconds, milliseconds, microseconds or nanoseconds since 1970, or ticks of .NET, depending on their size
    (LARGEST_SECONDS). Text is such a number or an ISO 8601 time, in UTC if it has no offset. With `time_format`, a
    format of strptime, numbers and text must have that format.
    """
    if times.dtype == pl.Date:
        return times.cast(pl.Int64) * DAY_S
    if isinstance(times.dtype, pl.Datetime):
        return times.to_physical() // PER_SECOND[times.dtype.time_unit]
    if time_format:
        text = times.cast(pl.String).str.strip_chars()
        return _parsed(text.str.replace("[zZ]$", "+0000") if time_format.endswith("%z") else text, time_format)
    if times.dtype == pl.String:
        times = times.str.strip_chars()
    whole = _whole_numbers(times)
    t = pl.col("t")
    ticks = t.is_between(621_355_968 * 10**9, 643 * 10**15)  # of .NET, 1970 to 2038; as ns, they are of 1989 and 1990
    nano = pl.when(ticks).then(t // 10**7 - 62_135_596_800).otherwise(t // 10**9)
    micro_or_nano = pl.when(t >= 10**17).then(nano).otherwise(t // 10**6)
    scaled = pl.when(t >= 10**14).then(micro_or_nano).when(t >= LARGEST_SECONDS).then(t // 10**3).otherwise(t)
    whole = pl.DataFrame({"t": whole}).select(scaled).to_series()
    return whole.fill_null(_iso_seconds(times)) if times.dtype == pl.String and whole.null_count() else whole


def _whole_numbers(times: pl.Series) -> pl.Series:
    if times.dtype.is_float():
        whole = pl.Series(dtype=pl.Int64).extend_constant(None, len(times))
    else:
        whole = times.cast(pl.Int64, strict=False)
    if whole.null_count():
        fraction = times.cast(pl.Float64, strict=False)
        fraction = fraction.set(~fraction.is_finite().fill_null(True), None)
        whole = whole.fill_null(fraction.floor().cast(pl.Int64, strict=False))
    return whole


def _iso_seconds(times: pl.Series) -> pl.Series:
    text = times.str.replace(r"^(\d{4}-\d\d-\d\d) ", "${1}T").str.replace(r"(:\d\d),(\d)", "${1}.${2}")
    text = text.str.replace(r"\[[\w/+:-]+\]$", "")  # of Java, after the offset
    text = text.str.replace(r" ([+-]\d{4}) (?:[A-Z]{3,5}|[+-]\d{2,4})$", "${1}")  # of Go
    text = text.str.replace(r"\s*([zZ]|UTC|GMT)$", "+00:00")
    parsed = _parsed(text, ISO[0])
    for pattern in ISO[1:]:
        if parsed.null_count():
            parsed = parsed.fill_null(_parsed(text, pattern))
    return parsed


def _parsed(text: pl.Series, pattern: str) -> pl.Series:
    try:
        return _as_polars_reads(text, pattern)
    except pl.exceptions.ComputeError:  # the settings refuse such a format
        return pl.Series(text.name, [None] * len(text), dtype=pl.Int64)


def _as_polars_reads(text: pl.Series, pattern: str) -> pl.Series:
    if not any(directive in pattern for directive in ("%H", "%I", "%c", "%X")):
        return text.str.to_date(pattern, strict=False).cast(pl.Int64) * DAY_S
    zone = "UTC" if "z" in pattern else None
    pattern = pattern.replace(".%f", "%.f").replace("%z", "%#z")  # in polars: fractions, and offsets without minutes
    if not any(directive in pattern for directive in ("%M", "%c", "%X")):  # which polars demands
        text, pattern = text + " 00", pattern + " %M"
    return text.str.to_datetime(pattern, strict=False, time_unit="us", time_zone=zone).dt.epoch("s")
