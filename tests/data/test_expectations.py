import logging
import re
from dataclasses import replace

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from great_expectations import expectations as gxe

from seqrec.artifacts import INTERACTIONS_SCHEMA, ITEMS_SCHEMA
from seqrec.config import ValidateConfig
from seqrec.data import expectations
from seqrec.data.expectations import Check, ExpectationError, Log, Suite, Totals

TOTALS = Totals(
    rows=4,
    users=2,
    items=2,
    distinct_times=4,
    duplicate_share=0.0,
    duplicates=[],
    unknown_items=0,
    unknown=[],
    user_drift=0.0,
    item_drift=0.0,
)
REFERENCE = {"rows": 4, "users": 2, "items": 2}
DAY = 86_400


def events(**columns):
    good = {
        "user_id": ["u1", "u1", "u2", "u2"],
        "item_id": ["a", "b", "a", "b"],
        "timestamp": [10 * DAY, 11 * DAY, 12 * DAY, 13 * DAY],
        "row": [0, 1, 2, 3],
        "rating": [0.5, 5.0, 3.5, None],
    }
    return pl.from_arrow(pa.table(good | columns, schema=INTERACTIONS_SCHEMA))


def catalogue(item_ids=("a", "b"), titles=("A", "B")):
    return pl.DataFrame(
        {"item_id": list(item_ids), "title": list(titles)}, schema={"item_id": pl.String, "title": pl.String}
    )


def failures(events=events(), catalogue=catalogue(), totals=TOTALS, reference=REFERENCE, **config) -> list[Check]:  # noqa: B008
    limits = ValidateConfig(**{"min_date": "1970-01-11", "max_date": "1970-01-14"} | config)
    suites = expectations.content_suites(Log.of(events), catalogue, totals, reference, limits)
    return [check for check in expectations.to_checks(expectations.run(suites)) if not check.success]


def test_a_good_log_passes_every_rule():
    assert failures() == []


def test_limits_are_inclusive():
    assert failures(totals=replace(TOTALS, duplicate_share=0.05, user_drift=0.25, item_drift=0.25), min_rows=4) == []


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
    check = failures(events(**change))[0]

    assert (check.table, check.column, check.severity) == ("interactions", column, severity)
    assert check.examples == examples


@pytest.mark.parametrize("item_id", ["B00YQ6X8EO", "a b", "naïve", "東京", "x" * 256, "{'k': 1}"])
def test_an_ordinary_id_passes(item_id):
    assert failures(events(item_id=["a", item_id, "a", "b"])) == []


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
    (check,) = failures(catalogue=catalogue(item_ids, titles))

    assert (check.table, check.column, check.severity) == ("items", column, severity)
    assert check.examples == examples


def test_an_empty_items_table_breaks_no_rule_about_values():
    assert failures(catalogue=catalogue([], [])) == []


@pytest.mark.parametrize(
    ("change", "reference", "column", "severity", "observed", "setting"),
    [
        ({"rows": 2}, {}, "rows", "critical", "2", "validate.min_rows"),
        ({"users": 1}, {}, "users", "critical", "1", ""),
        ({"items": 1}, {}, "items", "critical", "1", ""),
        ({"rows": 96}, {"rows": 100}, "rows", "warning", "96", ""),
        ({"rows": 89}, {"rows": 100}, "rows", "critical", "89", "validate.max_volume_change"),
        ({"rows": 111}, {"rows": 100}, "rows", "critical", "111", "validate.max_volume_change"),
        ({}, {"users": 3}, "users", "warning", "2", ""),
        ({}, {"items": 1}, "items", "warning", "2", ""),
        ({"distinct_times": 1}, {}, "timestamp (distinct)", "warning", "1", "ingest.columns"),
        (
            {"duplicate_share": 0.051},
            {},
            "user_id, item_id, timestamp (share repeated)",
            "critical",
            "0.051",
            "validate.max_duplicate_share",
        ),
        ({"unknown_items": 1, "unknown": ["b"]}, {}, "item_id (not in items)", "warning", "1", ""),
        ({"user_drift": 0.26}, {}, "user_id (drift)", "warning", "0.26", "validate.max_drift"),
        ({"item_drift": 0.26}, {}, "item_id (drift)", "warning", "0.26", "validate.max_drift"),
        (
            {"user_drift": None, "item_drift": None},
            {},
            "baseline",
            "info",
            "no baseline accepted yet",
            "accept-baseline",
        ),
    ],
)
def test_a_bad_total_fails_its_rule(change, reference, column, severity, observed, setting):
    check = failures(totals=replace(TOTALS, **change), reference=reference, min_rows=3)[0]

    assert (check.column, check.severity, check.observed) == (column, severity, observed)
    assert setting in check.advice


def test_examples_of_a_total_are_kept():
    (check,) = failures(totals=replace(TOTALS, unknown_items=7, unknown=list("abcdefg")))

    assert check.examples == ["a", "b", "c", "d", "e"]


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
    checks = expectations.to_checks(expectations.run(expectations.schema_suites(interactions, items)))

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
        expectations.run([Suite(frame=frame, expectations=[rule])])


@pytest.mark.parametrize("value", ["<img src=x onerror=alert(1)>", "${success}$$"])
def test_page_shows_hostile_values_as_text(value, caplog):
    suites = expectations.content_suites(
        Log.of(events(item_id=["a", f" {value}", "a", "b"])),
        catalogue(),
        replace(TOTALS, unknown_items=1, unknown=[value], duplicate_share=0.5),
        REFERENCE,
        ValidateConfig(),
    )
    with caplog.at_level(logging.INFO):
        page = expectations.to_page("tiny", expectations.to_checks(expectations.run(suites)))

    assert "<img" not in page
    assert page.count(value.replace("<", "&lt;").replace(">", "&gt;")) == 2
    assert caplog.records == []


def test_page_loads_nothing_and_shows_severity_and_advice():
    results = expectations.run(
        expectations.content_suites(
            Log.of(events()),
            catalogue(),
            replace(TOTALS, duplicate_share=0.5),
            REFERENCE,
            ValidateConfig(min_date="1970-01-01"),
        )
    )
    page = expectations.to_page("tiny", expectations.to_checks(results))

    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert "critical: at most 0.05" in page
    checks = expectations.to_checks(results)
    failed = sum(not check.success for check in checks)
    assert f"{len(checks) - failed} of {len(checks)} rules passed" in page
    assert page.count("<table>") == 1
    outcomes = re.findall(r'<tr class="(good|bad)">', page)
    assert outcomes == ["bad"] * failed + ["good"] * (len(checks) - failed)
    assert "raise validate.max_duplicate_share" in page


def test_progress_bars_and_analytics_are_off(capfd):
    import os

    assert failures() == []

    assert "Calculating" not in capfd.readouterr().err
    assert os.environ["GX_ANALYTICS_ENABLED"] == "false"
