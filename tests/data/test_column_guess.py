"""Columns of a log are recognised by name and by content, and refused where they cannot be."""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl
import pytest

from seqrec.data.column_guess import guess, is_lines

ROWS = 60


def table(**columns):
    """A log of 60 events: users a0.., items b0.., times a day apart, under the names given."""
    values = {
        "user": [f"a{row % 20}" for row in range(ROWS)],
        "item": [f"b{row % 15}" for row in range(ROWS)],
        "epoch": [1_600_000_000 + 86_400 * row for row in range(ROWS)],
        "iso": [f"{datetime(2020, 1, 1) + timedelta(days=row):%Y-%m-%d %H:%M:%S}" for row in range(ROWS)],
        "german": [f"{datetime(2020, 1, 1) + timedelta(days=row):%d.%m.%Y}" for row in range(ROWS)],
        "stars": [str(row % 5 + 1) for row in range(ROWS)],
        "price": [f"{row}.99" for row in range(ROWS)],
        "number": list(range(ROWS)),
        "words": [f"Thing {row % 15}" for row in range(ROWS)],
    }
    return pl.DataFrame({name: values[kind] for name, kind in columns.items()})


STYLES = {
    "ours": ({"user_id": "user", "item_id": "item", "timestamp": "epoch"}, "user_id item_id timestamp"),
    "shop": (
        {"order": "number", "Customer ID": "user", "product_name": "words", "SKU": "item", "bought_at": "iso"},
        "Customer ID SKU bought_at",
    ),
    "movielens": (
        {"userId": "user", "movieId": "item", "rating": "stars", "timestamp": "epoch"},
        "userId movieId timestamp",
    ),
    "amazon": (
        {"overall": "stars", "reviewerID": "user", "asin": "item", "reviewerName": "words", "unixReviewTime": "epoch"},
        "reviewerID asin unixReviewTime",
    ),
    "nothing in the names": (
        {"n": "number", "a": "user", "b": "item", "v": "stars", "p": "price", "c": "iso"},
        "a b c",
    ),
    "times without a name": ({"visitorid": "user", "itemid": "item", "x": "epoch"}, "visitorid itemid x"),
    "a German date": ({"uid": "user", "article": "item", "Date": "german"}, "uid article Date"),
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("style", STYLES)
def test_columns_are_found_in_headers_of_many_styles(tmp_path, style, kind):
    columns, wanted = STYLES[style]
    path = tmp_path / f"log.{kind}"
    getattr(table(**columns), f"write_{kind}")(path)

    found, time_format = guess(path, {})

    ours = {one.name: one.column for one in found}
    assert [ours[name] for name in ("user_id", "item_id", "timestamp")] == [
        *(name for name in columns if columns[name] == "user"),
        *(name for name in columns if columns[name] == "item"),
        *(name for name in columns if columns[name] in ("epoch", "iso", "german")),
    ]
    assert all(column in wanted for column in list(ours.values())[:3])
    assert time_format == ("%d.%m.%Y" if "german" in columns.values() else "")
    if style == "shop":
        assert ours["title"] == "product_name"


def test_what_the_caller_names_is_taken(tmp_path):
    table(user_id="user", item_id="item", other="item", timestamp="epoch").write_csv(tmp_path / "log.csv")

    found, _ = guess(tmp_path / "log.csv", {"item_id": "other"})

    assert {"item_id": "other", "user_id": "user_id"}.items() <= {one.name: one.column for one in found}.items()


@pytest.mark.parametrize(
    ("columns", "chosen", "message"),
    [
        ({"user": "user", "item": "item"}, {}, "no column looks like timestamp among user, item; name it: --time"),
        ({"user": "user", "item": "item", "time": "words"}, {}, "have no known format: set --time-format"),
        ({"user": "user"}, {"item_id": "sku"}, "log.csv has no column 'sku' for item_id; there are user"),
        ({"1": "user", "17": "item", "4.5": "stars"}, {}, "begins with values, 1, 17, 4.5: give it a header"),
    ],
)
def test_what_cannot_be_told_names_the_flag(tmp_path, columns, chosen, message):
    table(**columns).write_csv(tmp_path / "log.csv")

    with pytest.raises(ValueError, match=message):
        guess(tmp_path / "log.csv", chosen)


def test_lines_of_items_are_told_from_tables(tmp_path):
    (tmp_path / "lines.txt").write_text("1 5 7 9\n2 4 4\n")
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")

    assert is_lines(tmp_path / "lines.txt")
    assert not is_lines(tmp_path / "log.csv")
