import json
import logging
import math

import numpy as np
import pyarrow as pa
import pytest
from support import contents

from seqrec import artifacts
from seqrec.commands.reference import accept_reference
from seqrec.config import ConfigError, RegisterConfig, ValidateConfig, parse
from seqrec.stages.validate import ValidationFailed, histogram, validate

NOON = 1_000_000_000
NULLABLE = pa.schema([field.with_nullable(True) for field in artifacts.INTERACTIONS_SCHEMA])  # of another program


def log(users=3, events=4):
    """Return rows (user, item, time, row, rating): every user has `events` events on items i0, i1, ..."""
    return [
        (f"u{user}", f"i{event}", NOON + event, user * events + event, 4.0)
        for user in range(users)
        for event in range(events)
    ]


def write(folder, rows, item_ids=("i0", "i1", "i2", "i3"), reference=None, source="csv"):
    columns = zip(*rows, strict=True) if rows else [[]] * 5
    table = pa.table([list(column) for column in columns], schema=NULLABLE)
    artifacts.write_table(folder / artifacts.INTERACTIONS, table)
    items = pa.table([list(item_ids), [f"Title {item}" for item in item_ids]], schema=artifacts.ITEMS_SCHEMA)
    artifacts.write_table(folder / artifacts.ITEMS, items)
    artifacts.write_json(folder / artifacts.SOURCE_CARD, {"source": source, "reference": reference})


def run(folder, **config):
    return validate(
        dataset="tiny",
        data=folder,
        report=folder / "reports" / "validation.json",
        reference=folder / "reference.json",
        config=ValidateConfig(**config),
    )


def verdict(folder):
    return artifacts.read_json(folder / "reports" / "validation.json")


def failed(folder):
    return {(check["column"], check["severity"]) for check in verdict(folder)["checks"] if not check["success"]}


def test_a_good_log_succeeds_and_is_described(tmp_path):
    write(tmp_path, log(), reference={"rows": 12, "users": 3, "items": None})

    metrics = run(tmp_path)

    assert (metrics["rows"], metrics["users"], metrics["items"]) == (12, 3, 4)
    assert (metrics["events_per_user_median"], metrics["events_per_item_max"]) == (4, 3)
    assert metrics["failed_rules"] == 1  # no reference statistics
    report = verdict(tmp_path)
    assert report["success"]
    assert report["input_sha256"] == artifacts.sha256(tmp_path / artifacts.INTERACTIONS)
    assert {check["table"] for check in report["checks"]} == {"interactions", "items"}
    assert failed(tmp_path) == {("reference", "info")}
    assert (tmp_path / "reports" / "validation.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("rows", "column", "words"),
    [
        ([], "rows", "at least 1"),
        ([*log(), (None, "i0", NOON, 99, None)], "user_id", "1 of 4 ids are missing; clean the ids"),  # no example None
        ([*log(), ("u9\x07", "i0", NOON, 99, None)], "user_id", r"control characters .* e.g. 'u9\\x07'; .*"),
        (
            [*log(), ("u0", "i0", NOON, 99, None)],
            "user_id, item_id, timestamp (share repeated)",
            r"found 0.0769, e.g. 'u0, i0, 1000000000 \(row 0\)', 'u0, i0, 1000000000 \(row 99\)'; "
            "raise validate.max_duplicate_share",
        ),
    ],
)
def test_a_failed_critical_rule_stops_with_column_rule_examples_and_setting(tmp_path, rows, column, words):
    write(tmp_path, rows)

    with pytest.raises(ValidationFailed, match=words) as error:
        run(tmp_path)

    assert f"interactions.{column} (critical): " in str(error.value)
    assert (column, "critical") in failed(tmp_path)
    assert not verdict(tmp_path)["success"]
    assert (tmp_path / "reports" / "validation.html").is_file()


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        ([*log(), ("u9", "i0", 10**11, 99, None)], {"max_date": "6000-01-01"}),
        ([(f"u{n % 3}", f"i{n % 4}", n, n, None) for n in range(12)], {"min_date": "1970-01-01"}),  # times = order
    ],
)
def test_the_setting_that_the_message_names_lets_the_log_pass(tmp_path, rows, config):
    write(tmp_path, rows)
    with pytest.raises(ValidationFailed, match="validate." + next(iter(config))):
        run(tmp_path)

    run(tmp_path, **config)


@pytest.mark.parametrize("source", ["lines", "prefixes"])
def test_positions_need_not_be_dates(tmp_path, source):
    """Sources without times number the events of each user from 0."""
    write(tmp_path, [(user, item, row % 4, row, None) for user, item, _, row, _ in log()], source=source)

    run(tmp_path)

    assert not [check for check in verdict(tmp_path)["checks"] if "lies between" in check["rule"]]


def test_warnings_are_logged_and_do_not_stop(tmp_path, caplog):
    rows = [(user, item, NOON, row, 4.7) for user, item, _, row, _ in log()]
    write(tmp_path, rows, item_ids=("i0", "i1", "elsewhere"), reference={"rows": 13, "users": 3, "items": 4})

    with caplog.at_level(logging.WARNING):
        metrics = run(tmp_path)

    assert verdict(tmp_path)["success"]
    assert failed(tmp_path) == {
        ("rating", "warning"),
        ("rows", "warning"),
        ("timestamp (distinct)", "warning"),
        ("item_id (not in items)", "warning"),
        ("reference", "info"),
    }
    assert metrics["failed_rules"] == 5
    assert len(caplog.messages) == 4  # not the rule of severity info
    reports = contents(tmp_path / "reports")
    run(tmp_path)
    assert contents(tmp_path / "reports") == reports
    assert "order of a sequence is the order of the source's rows" in caplog.text
    assert "found 2, e.g. 'i2', 'i3'" in caplog.text


def test_an_items_file_that_knows_no_item_of_the_log_stops(tmp_path):
    write(tmp_path, log(), item_ids=("1", "2"))

    with pytest.raises(ValidationFailed, match="must write ids alike, with the same leading zeros"):
        run(tmp_path)
    assert ("item_id (not in items)", "critical") in failed(tmp_path)


def test_a_wrong_column_type_stops_before_the_rules_that_need_it(tmp_path):
    write(tmp_path, log())
    table = artifacts.pq.read_table(tmp_path / artifacts.INTERACTIONS)
    table = table.set_column(2, "timestamp", table["timestamp"].cast(pa.string()))
    artifacts.write_table(tmp_path / artifacts.INTERACTIONS, table)

    with pytest.raises(
        ValidationFailed, match=r"timestamp \(critical\): the rule 'the type is int64' is not met: .* e.g. 'string'"
    ):
        run(tmp_path)

    assert verdict(tmp_path)["statistics"] == {}


def test_an_accepted_baseline_shows_no_drift_and_a_changed_log_does(tmp_path):
    write(tmp_path, log())
    accept_reference(dataset="tiny", config=RegisterConfig(), data=tmp_path, reference=tmp_path / "reference.json")
    assert run(tmp_path)["user_drift"] == 0.0
    assert failed(tmp_path) == set()

    write(tmp_path, log(users=3, events=1) + [("u8", f"i{n}", NOON, 90 + n, None) for n in range(3)])
    (tmp_path / artifacts.SOURCE_CARD).unlink()  # as with tables of another program
    metrics = run(tmp_path)

    # Users had 4 events each, now 1, 1, 1 and 3: the shares of the bins 1, 2-3, 4+ go from 0, 0, 1 to 0.75, 0.25, 0.
    expected = (0.75 - 1e-4) * math.log(0.75 / 1e-4) + (0.25 - 1e-4) * math.log(0.25 / 1e-4) + 0.9999 * math.log(1e4)
    assert metrics["user_drift"] == pytest.approx(expected, abs=1e-5)
    assert ("user_id (drift)", "warning") in failed(tmp_path)


def test_accepting_keeps_the_other_datasets(tmp_path):
    reference = tmp_path / "reference.json"
    other = {"item_id": histogram(np.array([1])), "user_id": histogram(np.array([1]))}
    artifacts.write_json(reference, {"zeta": other})
    write(tmp_path, log())

    accept_reference(dataset="tiny", config=RegisterConfig(), data=tmp_path, reference=reference)

    assert list(json.loads(reference.read_bytes()).items()) == [
        (
            "tiny",
            {
                "item_id": {"edges": [1, 2], "shares": [0.0, 1.0]},  # 4 items of 3 events
                "user_id": {"edges": [1, 2, 4], "shares": [0.0, 0.0, 1.0]},  # 3 users of 4 events
            },
        ),
        ("zeta", other),
    ]


def test_a_folder_of_another_dataset_cannot_be_a_baseline(tmp_path):
    write(tmp_path, log())
    artifacts.write_json(tmp_path / "sequences" / artifacts.SPLIT_CARD, {"dataset": "mine"})

    with pytest.raises(ConfigError, match=r"--dataset: .* holds mine, not tiny: add --dataset mine"):
        accept_reference(dataset="tiny", config=RegisterConfig(), data=tmp_path, reference=tmp_path / "reference.json")
    assert not (tmp_path / "reference.json").exists()


def test_an_empty_log_cannot_be_a_baseline(tmp_path):
    write(tmp_path, [])

    with pytest.raises(ValueError, match="no rows"):
        accept_reference(dataset="tiny", config=RegisterConfig(), data=tmp_path, reference=tmp_path / "reference.json")


@pytest.mark.parametrize(
    "content",
    [
        "<<<<<<< HEAD",
        '{"tiny": [1]}',
        '{"tiny": {"user_id": [1]}}',
        '{"tiny": {"users": {}}}',
        '{"tiny": {"user_id": {"edges": [2, 1], "shares": [1, 0]}}}',
        '{"tiny": {"user_id": {"edges": [1], "shares": ["x"]}}}',
    ],
)
def test_a_broken_baseline_file_is_named(tmp_path, content):
    write(tmp_path, log())
    (tmp_path / "reference.json").write_text(content, encoding="utf-8")

    with pytest.raises(ValueError, match=r"reference\.json is damaged"):
        run(tmp_path)


def test_limits_are_checked_when_the_section_is_read():
    with pytest.raises(ConfigError, match=r"validate.*min_date must be before max_date"):
        parse(ValidateConfig, {"min_date": "2020-01-01", "max_date": "2020-01-01"}, "validate")
    with pytest.raises(ConfigError, match=r"validate.*yesterday"):
        parse(ValidateConfig, {"min_date": "yesterday"}, "validate")
