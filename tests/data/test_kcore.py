"""The k-core against its definition."""

import narwhals as nw
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from seqrec.data.kcore import k_core

logs = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("vwxyz")), max_size=60)


def core_by_hand(rows, users, items):
    rows = list(rows)
    while True:
        kept = [
            r for r in rows if sum(s[0] == r[0] for s in rows) >= users and sum(s[1] == r[1] for s in rows) >= items
        ]
        if kept == rows:
            return rows
        rows = kept


@settings(max_examples=60, deadline=None)
@given(logs, st.integers(1, 4), st.integers(1, 4))
def test_k_core_equals_its_definition(rows, users, items):
    columns = {"user": [user for user, _ in rows], "item": [item for _, item in rows]}
    table = pl.LazyFrame(columns, schema={"user": pl.String, "item": pl.String})

    got = k_core(nw.from_native(table.with_row_index("row")), users, items).collect()

    expected = core_by_hand([(*row, number) for number, row in enumerate(rows)], users, items)
    assert sorted(got["row"].to_list()) == sorted(r[2] for r in expected)
