import logging
import re
import subprocess
import sys
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
EARLY, LATE = 10 * DAY - 1, 13 * DAY + 1


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


def outcomes(checks):
    return [(check.column, check.severity, check.examples) for check in checks]


def test_ordinary_values_and_totals_at_the_limits_pass_in_silence(capfd, caplog):
    events = good_events(item_id=["B00YQ6X8EO", "a b", "naïve", "東京"], user_id=["x" * 256, "{'k': 1}", "u", "u"])
    limits = {"min_rows": 4, "log": {"rows": 100, "repeats": 5}, "reference": {}}

    assert failures(events, drift={"user_id": 0.25, "item_id": 0.25}, **limits) == []

    assert "Calculating" not in capfd.readouterr().err
    assert caplog.records == []


@pytest.mark.parametrize(
    ("column", "values", "severity", "examples"),
    [
        ("user_id", [None, "", "u1 ", "\ufeffu1"], "critical", [[None], ["", "u1 ", "\ufeffu1"]]),
        ("item_id", ["a\x00", "b\n", "x" * 257, "\u00a0b"], "critical", [["a\x00", "b\n", "\u00a0b"], ["x" * 257]]),
        ("timestamp", [EARLY, LATE, None, 12 * DAY], "critical", [[None], [EARLY, LATE]]),
        ("row", [0, 1, 1, None], "critical", [[None], [1]]),
        ("rating", [3.7, 0.0, 5.5, float("nan")], "warning", [["0.0", "3.7", "5.5", "NaN"]]),
    ],
)
def test_bad_values_fail_their_rules(column, values, severity, examples):
    checks = failures(good_events(**{column: values}), reference={})

    assert {check.table for check in checks} == {"interactions"}
    assert outcomes(checks) == [(column, severity, some) for some in examples]


def test_bad_items_fail_their_rules():
    items = good_catalogue(["a", "b", "b", None, "c\t", "x" * 257], ["A", "B", "B", "N", None, "X"])

    checks = failures(catalogue=items)

    assert {check.table for check in checks} == {"items"}
    assert outcomes(checks) == [
        *[("item_id", "critical", some) for some in ([None], ["c\t"], ["x" * 257], ["b"])],
        ("title", "info", [None]),
    ]


def test_an_empty_items_table_breaks_no_rule_about_values():
    assert failures(catalogue=good_catalogue([], [])) == []


ONE = np.array([4])
SHARE = "user_id, item_id, timestamp (share repeated)"


@pytest.mark.parametrize(
    ("change", "wanted"),  # columns, severities and values that fail, with a word of the advice
    [
        (
            {"log": {"rows": 2, "distinct_times": 1, "events": {"user_id": ONE, "item_id": ONE}}},
            {
                "rows critical 2": "validate.min_rows",
                "users critical 1": "",
                "items critical 1": "",
                "timestamp (distinct) warning 1": "ingest.columns",
            },
        ),
        (
            {"log": {"rows": 96}, "reference": {"rows": 100, "users": 3, "items": 1}},
            {"rows warning 96": "", "users warning 2": "", "items warning 2": ""},
        ),
        (
            {"log": {"rows": 89}, "reference": {"rows": 100}},
            {"rows critical 89": "validate.max_volume_change", "rows warning 89": ""},
        ),
        (
            {"log": {"rows": 111}, "reference": {"rows": 100}},
            {"rows critical 111": "validate.max_volume_change", "rows warning 111": ""},
        ),
        ({"log": {"rows": 1000, "repeats": 51}}, {f"{SHARE} critical 0.051": "validate.max_duplicate_share"}),
        (
            {"drift": {"user_id": 0.26, "item_id": 0.26}},
            {f"{column} (drift) warning 0.26": "validate.max_drift" for column in ("user_id", "item_id")},
        ),
        ({"drift": {}}, {"reference info no reference statistics accepted yet": "accept-reference"}),
    ],
)
def test_bad_totals_fail_their_rules(change, wanted):
    checks = failures(**{"reference": {}, "min_rows": 3, **change})

    assert [f"{check.column} {check.severity} {check.observed}" for check in checks] == list(wanted)
    assert all(word in check.advice for check, word in zip(checks, wanted.values(), strict=True))


def test_examples_of_a_total_are_kept():
    (check,) = failures(unknown=list("abcdefg"))

    assert (check.column, check.severity) == ("item_id (not in items)", "warning")
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


def test_page_shows_hostile_values_as_text():
    values = ["<img src=x onerror=alert(1)>", "${success}$$"]
    checks_ = checks(good_events(item_id=["a", "b", *(f" {value}" for value in values)]), unknown=values)

    page = expectations.to_page("tiny", checks_)

    assert "<img" not in page
    assert [page.count(text) for text in ("&lt;img src=x onerror=alert(1)&gt;", "${success}$$")] == [2, 2]


def test_page_loads_nothing_and_shows_severity_and_advice():
    found = checks(log={"repeats": 2})
    page = expectations.to_page("tiny", found)

    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert "critical: at most 0.05" in page
    assert f"{len(found) - 1} of {len(found)} rules passed" in page
    assert re.findall(r'<tr class="(good|bad)">', page) == ["bad"] + ["good"] * (len(found) - 1)
    assert "raise validate.max_duplicate_share" in page


def test_great_expectations_is_silent_in_a_verbose_log():
    code = "import logging, seqrec.stages.validate; print(logging.getLogger('great_expectations').level)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == logging.WARNING  # before it is imported
