import re
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from great_expectations import expectations as gxe

from seqrec.artifacts import INTERACTIONS_SCHEMA, ITEMS_SCHEMA
from seqrec.config import ValidateConfig
from seqrec.data import expectations, log_counts
from seqrec.data.expectations import Check, ExpectationError, Suite

NO_DRIFT = {"user_id": 0.0, "item_id": 0.0}
REFERENCE = {"rows": 4, "users": 2, "items": 2}
DAY = 86_400


def good_events(**columns):
    good = {
        "user_id": ["u1", "u1", "u2", "u2"],
        "item_id": ["a", "b", "a", "b"],
        "timestamp": [10 * DAY, 11 * DAY, 12 * DAY, 13 * DAY],
        "row": [0, 1, 2, 3],
        "rating": [0.5, 5.0, 3.5, None],
    }
    return pl.from_arrow(pa.table(good | columns, schema=INTERACTIONS_SCHEMA))


def good_catalogue(item_ids=("a", "b"), titles=("A", "B")):
    return pl.DataFrame(
        {"item_id": list(item_ids), "title": list(titles)}, schema={"item_id": pl.String, "title": pl.String}
    )


def checks(events=None, catalogue=None, *, unknown=(), drift=NO_DRIFT, reference=REFERENCE, log=None, **config):
    """Return the outcome of every rule; `log` replaces counts of the events."""
    limits = ValidateConfig(**{"min_date": "1970-01-11", "max_date": "1970-01-14"} | config)
    counted = replace(log_counts.in_memory(good_events() if events is None else events), **(log or {}))
    items = good_catalogue() if catalogue is None else catalogue
    suites = expectations.content_suites(
        counted, items, pl.Series(list(unknown), dtype=pl.String), drift, reference, limits
    )
    return expectations.run(suites)


def failures(*tables, **changes) -> list[Check]:
    return [check for check in checks(*tables, **changes) if not check.success]


def test_limits_are_inclusive():
    limits = {"min_rows": 4, "log": {"rows": 100, "repeats": 5}, "reference": {}}
    assert failures(drift={"user_id": 0.25, "item_id": 0.25}, **limits) == []


@pytest.mark.parametrize(
    ("change", "column", "severity", "examples"),
    [
        ({"user_id": ["u1", None, "u2", "u2"]}, "user_id", "critical", [None]),
        ({"user_id": ["u1", "", "u2", "u2"]}, "user_id", "critical", [""]),
        ({"user_id": ["u1", "u1 ", "u2", "u2"]}, "user_id", "critical", ["u1 "]),
        ({"user_id": ["u1", "\ufeffu1", "u2", "u2"]}, "user_id", "critical", ["\ufeffu1"]),
        ({"user_id": ["u1", "u\x001", "u2", "u2"]}, "user_id", "critical", ["u\x001"]),
        ({"item_id": ["a", "b\n", "a", "b"]}, "item_id", "critical", ["b\n"]),
        ({"item_id": ["a", "\u00a0b", "a", "b"]}, "item_id", "critical", ["\u00a0b"]),
        ({"item_id": ["a", "x" * 257, "a", "b"]}, "item_id", "critical", ["x" * 257]),
        ({"timestamp": [10 * DAY, None, 12 * DAY, 13 * DAY]}, "timestamp", "critical", [None]),
        ({"timestamp": [10 * DAY - 1, 11 * DAY, 12 * DAY, 13 * DAY]}, "timestamp", "critical", [10 * DAY - 1]),
        ({"timestamp": [10 * DAY, 11 * DAY, 12 * DAY, 13 * DAY + 1]}, "timestamp", "critical", [13 * DAY + 1]),
        ({"row": [0, 1, 1, None]}, "row", "critical", [None]),
        ({"row": [0, 1, 1, 2]}, "row", "critical", [1]),
        ({"rating": [0.5, 5.0, 3.7, 1.0]}, "rating", "warning", ["3.7"]),
        ({"rating": [0.5, 5.0, 0.0, 5.5]}, "rating", "warning", ["0.0", "5.5"]),
        ({"rating": [0.5, 5.0, float("nan"), 1.0]}, "rating", "warning", ["NaN"]),
    ],
)
def test_a_bad_value_fails_its_rule(change, column, severity, examples):
    check = failures(good_events(**change))[0]

    assert (check.table, check.column, check.severity) == ("interactions", column, severity)
    assert check.examples == examples


def test_ordinary_ids_pass():
    users = ["x" * 256, "{'k': 1}", "u", "u"]

    assert failures(good_events(item_id=["B00YQ6X8EO", "a b", "naïve", "東京"], user_id=users), reference={}) == []


@pytest.mark.parametrize(
    ("item_ids", "titles", "column", "severity", "examples"),
    [
        (["a", "b", "b"], ["A", "B", "C"], "item_id", "critical", ["b"]),
        (["a", None], ["A", "B"], "item_id", "critical", [None]),
        (["a", "b\t"], ["A", "B"], "item_id", "critical", ["b\t"]),
        (["a", "x" * 257], ["A", "B"], "item_id", "critical", ["x" * 257]),
        (["a", "b"], ["A", None], "title", "info", [None]),
    ],
)
def test_a_bad_item_fails_its_rule(item_ids, titles, column, severity, examples):
    (check,) = failures(catalogue=good_catalogue(item_ids, titles))

    assert (check.table, check.column, check.severity) == ("items", column, severity)
    assert check.examples == examples


def test_an_empty_items_table_breaks_no_rule_about_values():
    assert failures(catalogue=good_catalogue([], [])) == []


ONE, TWO = np.array([4]), np.array([2, 2])
SHARE = "user_id, item_id, timestamp (share repeated)"


@pytest.mark.parametrize(
    ("change", "column", "severity", "observed", "setting"),
    [
        ({"log": {"rows": 2}}, "rows", "critical", "2", "validate.min_rows"),
        ({"log": {"events": {"user_id": ONE, "item_id": TWO}}}, "users", "critical", "1", ""),
        ({"log": {"events": {"user_id": TWO, "item_id": ONE}}}, "items", "critical", "1", ""),
        ({"log": {"rows": 96}, "reference": {"rows": 100}}, "rows", "warning", "96", ""),
        ({"log": {"rows": 89}, "reference": {"rows": 100}}, "rows", "critical", "89", "validate.max_volume_change"),
        ({"log": {"rows": 111}, "reference": {"rows": 100}}, "rows", "critical", "111", "validate.max_volume_change"),
        ({"reference": {"users": 3}}, "users", "warning", "2", ""),
        ({"reference": {"items": 1}}, "items", "warning", "2", ""),
        ({"log": {"distinct_times": 1}}, "timestamp (distinct)", "warning", "1", "ingest.columns"),
        ({"log": {"rows": 1000, "repeats": 51}}, SHARE, "critical", "0.051", "validate.max_duplicate_share"),
        ({"unknown": ["b"]}, "item_id (not in items)", "warning", "1", ""),
        ({"drift": {"user_id": 0.26, "item_id": 0}}, "user_id (drift)", "warning", "0.26", "validate.max_drift"),
        ({"drift": {"user_id": 0, "item_id": 0.26}}, "item_id (drift)", "warning", "0.26", "validate.max_drift"),
        ({"drift": {}}, "reference", "info", "no reference statistics accepted yet", "accept-reference"),
    ],
)
def test_a_bad_total_fails_its_rule(change, column, severity, observed, setting):
    check = failures(**{"reference": {}, "min_rows": 3, **change})[0]

    assert (check.column, check.severity, check.observed) == (column, severity, observed)
    assert setting in check.advice


def test_examples_of_a_total_are_kept():
    (check,) = failures(unknown=list("abcdefg"))

    assert (check.observed, check.examples) == ("7", ["a", "b", "c", "d", "e"])


@pytest.mark.parametrize(
    ("interactions", "items", "failed"),
    [
        (INTERACTIONS_SCHEMA, ITEMS_SCHEMA.append(pa.field("brand", pa.string())), []),
        (INTERACTIONS_SCHEMA.remove(4), ITEMS_SCHEMA, [("interactions", "")]),
        (INTERACTIONS_SCHEMA.append(pa.field("x", pa.string())), ITEMS_SCHEMA, [("interactions", "")]),
        (INTERACTIONS_SCHEMA.set(2, pa.field("timestamp", pa.string())), ITEMS_SCHEMA, [("interactions", "timestamp")]),
        (INTERACTIONS_SCHEMA, ITEMS_SCHEMA.remove(1), [("items", "")]),
        (INTERACTIONS_SCHEMA, ITEMS_SCHEMA.append(pa.field("price", pa.float64())), [("items", "price")]),
    ],
)
def test_columns_and_types(interactions, items, failed):
    checks = expectations.run(expectations.schema_suites(interactions, items))

    assert [(check.table, check.column) for check in checks if not check.success] == failed


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pd.DataFrame({"interactions.timestamp": pd.Series(["1998", "1999"], dtype=object)}), "same type"),
        (pd.DataFrame({"interactions.row": [1]}), "does not exist"),
    ],
)
def test_a_rule_that_cannot_be_evaluated_raises_instead_of_failing(frame, reason):
    rule = gxe.ExpectColumnValuesToBeBetween(column="interactions.timestamp", min_value=0, max_value=1)

    with pytest.raises(ExpectationError, match=rf"be_between .* on interactions.timestamp: .*{reason}"):
        expectations.run([Suite(frame, [rule])])


@pytest.mark.parametrize("value", ["<img src=x onerror=alert(1)>", "${success}$$"])
def test_page_shows_hostile_values_as_text(value):
    found = checks(good_events(item_id=["a", f" {value}", "a", "b"]), unknown=[value])

    page = expectations.to_page("tiny", found)

    assert "<img" not in page
    assert page.count(value.replace("<", "&lt;").replace(">", "&gt;")) == 2


def test_page_loads_nothing_and_shows_severity_and_advice():
    found = checks(log={"repeats": 2})
    page = expectations.to_page("tiny", found)

    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert "critical: at most 0.05" in page
    assert f"{len(found) - 1} of {len(found)} rules passed" in page
    assert re.findall(r'<tr class="(good|bad)">', page) == ["bad"] + ["good"] * (len(found) - 1)
    assert "raise validate.max_duplicate_share" in page


def test_nothing_but_the_verdict_is_shown(capfd, caplog):
    assert failures() == []

    assert "Calculating" not in capfd.readouterr().err
    assert caplog.records == []
