"""Great Expectations suites for the tables that `ingest` writes.

Only this module imports Great Expectations; since that takes seconds, the validate stage imports it when it runs.
Rules about ids run on the distinct ids, and rules about a whole table on a one-row table of totals, so that only
`timestamp` and `row` are converted to pandas at full length. Columns are named `table.column`, so that one page can
show the results of both tables.
"""

from __future__ import annotations

import html
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import; private networks hang on the call home

import great_expectations as gx
import pandas as pd
import polars as pl
import pyarrow as pa
from great_expectations import expectations as gxe
from great_expectations.data_context.types.base import ProgressBarsConfig

from seqrec.artifacts import INTERACTIONS_SCHEMA, ITEMS_SCHEMA, MAX_ID_LENGTH
from seqrec.config import ValidateConfig
from seqrec.data.log_counts import EXAMPLES, LogCounts

# Silences notes about folders and empty lists; this logger sets its own level, the parent's is set in validate.py.
logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)

RATINGS = tuple(str(half / 2) for half in range(1, 11))  # "0.5" ... "5.0"
# Unicode blanks are listed, because \s of RE2, which pandas may use, matches only ASCII.
_BLANK = "[\\s\u0085\u00a0\u1680\u2000-\u200b\u2028\u2029\u202f\u205f\u3000\ufeff]"
UNCLEAN_ID = rf"[\x00-\x1f\x7f-\x9f]|^{_BLANK}|{_BLANK}$|^$"
NO_TIME = "{:,} of {:,} events have none"
TIME_ADVICE = "check that ingest.columns maps timestamp to the right column"
ID_ADVICE = "clean the ids in the source, or check that ingest.columns maps the right column"

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #fff; --line: #c8c8c8; --good: #1b6e3c; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #16181c; --line: #444; --good: #7fd6a0; --bad: #ff8a80 }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em;
       color: var(--text); background: var(--back) }
.banner { font-size: 1.2em; font-weight: bold; border-left: .4em solid; padding: .4em .7em }
.good { color: var(--good) } .bad { color: var(--bad) } .scroll { overflow-x: auto }
table { border-collapse: collapse } caption { text-align: left; padding-bottom: .4em }
th, td { border-bottom: 1px solid var(--line); padding: .3em .7em; text-align: left; vertical-align: top }
tbody th { font-weight: normal }
"""
PAGE_HEADS = ("column", "rule", "outcome", "found", "what to do")


class ExpectationError(RuntimeError):
    """Great Expectations could not evaluate a rule, so the data neither passed nor failed it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of a rule; `examples` holds up to `EXAMPLES` offending values if it failed."""

    table: str
    column: str
    rule: str
    severity: str  # critical | warning | info
    success: bool
    observed: str
    examples: list[Any]
    advice: str  # the setting to change

    @property
    def shown(self) -> str:
        """The examples in words, after what was observed; a missing value is not worth showing."""
        values = [repr(value) for value in self.examples if value is not None]
        return f", e.g. {', '.join(values)}" if values else ""


class Suite(NamedTuple):
    """Expectations about columns `table.column`, and the frame with these columns; in Spark they are named `column`."""

    frame: Any  # a frame of pandas or Spark
    rules: list[gxe.Expectation]


def _rule(
    kind: type[gxe.Expectation],
    text: str,
    *,
    severity: str = "critical",
    advice: str = "run ingest again",
    finding: str = "",
    examples: Sequence[str] = (),
    **limits: Any,
) -> gxe.Expectation:
    """Return an expectation with the texts of its rule.

    `finding` is shown on failure; it may have places for the numbers of offenders and of values. `examples` are shown
    where the expectation itself has no offending values.
    """
    meta = {"advice": advice, "examples": list(examples), "finding": finding}
    return kind(description=text, severity=severity, meta=meta, **limits)


def schema_suites(interactions: pa.Schema, items: pa.Schema) -> list[Suite]:
    """Return the rules about columns and types; if one of them fails, the others cannot run."""
    attributes = [pa.field(name, pa.string()) for name in items.names if name not in ITEMS_SCHEMA.names]
    return [
        _schema_suite("interactions", interactions, list(INTERACTIONS_SCHEMA)),
        _schema_suite("items", items, [*ITEMS_SCHEMA, *attributes]),
    ]


def _schema_suite(table: str, schema: pa.Schema, expected: Sequence[pa.Field]) -> Suite:
    advice = "run ingest again: another version of it, or another program, wrote this file"
    text = f"has exactly the columns {', '.join(field.name for field in expected)}"
    names = [f"{table}.{field.name}" for field in expected]
    rules = [_rule(gxe.ExpectTableColumnsToMatchSet, text, column_set=names, advice=advice)]
    for name, field in zip(names, expected, strict=True):
        if field.name in schema.names:
            kind, types = gxe.ExpectColumnValuesToBeInSet, [str(field.type)]
            rules.append(_rule(kind, f"the type is {field.type}", column=name, value_set=types, advice=advice))
    return Suite(pd.DataFrame({f"{table}.{field.name}": [str(field.type)] for field in schema}), rules)


def content_suites(
    log: LogCounts,
    catalogue: pl.DataFrame,
    unknown: pl.Series,
    drift: Mapping[str, float],
    published: Mapping[str, int],
    config: ValidateConfig,
    *,
    dated: bool = True,
) -> list[Suite]:
    """Return the rules about values.

    Args:
        log: the interactions.
        catalogue: `item_id` and `title` of the items table.
        unknown: items with events that are not in the items table.
        drift: by `user_id` and `item_id`, the drift against the accepted reference statistics; empty without one.
        published: known `rows`, `users` and `items` of the source; missing ones are not compared.
        config: the limits.
        dated: whether timestamps are times; otherwise they are positions, which need not lie between two dates.
    """
    return [
        _time_suite(log.times, config, dated),
        _id_suite("interactions.user_id", log.users),
        _id_suite("interactions.item_id", log.items),
        _rating_suite(log.ratings),
        _catalogue_suite(catalogue),
        _totals_suite(log, len(catalogue), unknown, drift, published, config),
    ]


def _time_suite(times: Any, config: ValidateConfig, dated: bool) -> Suite:
    time, row = "interactions.timestamp", "interactions.row"
    missing, unique = gxe.ExpectColumnValuesToNotBeNull, gxe.ExpectColumnValuesToBeUnique
    order, repeated = "row numbers are unique (they order events with equal times)", "{:,} of {:,} are repeated"
    rules = [_rule(missing, "every event has a time", column=time, advice=TIME_ADVICE, finding=NO_TIME)]
    if dated:
        least, most = (_seconds(day) for day in (config.min_date, config.max_date))
        advice = "widen validate.min_date and validate.max_date if these times (seconds since 1970, UTC) are right"
        text = f"every time lies between {config.min_date} and {config.max_date}"
        between = gxe.ExpectColumnValuesToBeBetween
        rules.append(_rule(between, text, column=time, min_value=least, max_value=most, advice=advice))
    rules.append(_rule(missing, "every event has a row number", column=row))
    rules.append(_rule(unique, order, column=row, finding=repeated))
    return Suite(times.add_prefix("interactions.") if isinstance(times, pd.DataFrame) else times, rules)


def _seconds(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())


def _texts(values: Sequence[str | None]) -> pd.Series:
    return pd.Series(values, dtype=object)


def _id_suite(column: str, ids: pl.Series) -> Suite:
    return Suite(pd.DataFrame({column: _texts(ids.cast(pl.String).sort().to_list())}), _id_rules(column))


def _id_rules(column: str) -> list[gxe.Expectation]:
    clean = "ids have no control characters or blanks at the ends, and are not empty"
    missing, length = gxe.ExpectColumnValuesToNotBeNull, gxe.ExpectColumnValueLengthsToBeBetween
    texts = {"column": column, "advice": ID_ADVICE}
    return [
        _rule(missing, "every row has an id", finding="{:,} of {:,} ids are missing", **texts),
        _rule(gxe.ExpectColumnValuesToNotMatchRegex, clean, regex=UNCLEAN_ID, **texts),
        _rule(length, f"ids have at most {MAX_ID_LENGTH} characters", max_value=MAX_ID_LENGTH, **texts),
    ]


def _rating_suite(ratings: pl.Series) -> Suite:
    # As text, because pandas and Great Expectations treat NaN as missing, although it is an invalid rating.
    values = ratings.drop_nulls().unique().sort().cast(pl.String).to_list()
    rule = _rule(
        gxe.ExpectColumnValuesToBeInSet,
        "ratings are 0.5, 1, ... 5, or missing",
        column="interactions.rating",
        value_set=list(RATINGS),
        severity="warning",
        advice="this matters only if prepare.min_rating is set: nothing else reads the ratings",
    )
    return Suite(pd.DataFrame({"interactions.rating": _texts(values)}), [rule])


def _catalogue_suite(catalogue: pl.DataFrame) -> Suite:
    unique = _rule(
        gxe.ExpectColumnValuesToBeUnique,
        "every item appears once",
        column="items.item_id",
        advice="remove the repeated items from the source's items file",
        finding="{:,} of {:,} rows repeat an item",
    )
    title = _rule(
        gxe.ExpectColumnValuesToNotBeNull,
        "every item has a title",
        column="items.title",
        severity="info",
        advice="prepare.require_title drops items without a title",
        finding="{:,} of {:,} items have no title",
    )
    frame = pd.DataFrame({f"items.{name}": _texts(catalogue[name].to_list()) for name in ("item_id", "title")})
    return Suite(frame, [*_id_rules("items.item_id"), unique, title])


def _totals_suite(
    log: LogCounts,
    described: int,
    unknown: pl.Series,
    drift: Mapping[str, float],
    published: Mapping[str, int],
    config: ValidateConfig,
) -> Suite:
    items = len(log.events["item_id"])
    values = {
        "rows": log.rows,
        "users": len(log.events["user_id"]),
        "items": items,
        "timestamp (distinct)": log.distinct_times,
        "user_id, item_id, timestamp (share repeated)": log.repeats / max(log.rows, 1),
        "item_id (not in items)": len(unknown),
        "user_id (drift)": drift.get("user_id"),
        "item_id (drift)": drift.get("item_id"),
        "reference": len(drift),
    }
    # Python numbers, because Great Expectations prints those of numpy as np.float64(0.1).
    frame = pd.DataFrame({f"interactions.{name}": [value] for name, value in values.items()}, dtype=object)
    foreign = described > 0 and 0 < items == len(unknown)
    relations = _relation_rules(log.repeated, unknown.head(EXAMPLES).to_list(), config, foreign=foreign)
    return Suite(frame, [*_volume_rules(published, config), *relations, *_drift_rules(drift, config)])


def _volume_rules(published: Mapping[str, int], config: ValidateConfig) -> list[gxe.Expectation]:
    too_few = "use a larger source: one user or one item is not enough to learn from"
    rules = [
        _total("rows", f"at least {config.min_rows}", least=config.min_rows, advice="lower validate.min_rows"),
        _total("users", "at least 2", least=2, advice=too_few),
        _total("items", "at least 2", least=2, advice=too_few),
    ]
    if "rows" in published:
        change = config.max_volume_change
        least, most = (round(published["rows"] * (1 + sign * change), 6) for sign in (-1, 1))
        rule = f"within {change:.0%} of the {published['rows']:,} rows known for this source"
        advice = "ingest again, or raise validate.max_volume_change"
        rules.append(_total("rows", rule, least=least, most=most, advice=advice))
    advice = "find out why before you compare results with other work"
    for name in ("rows", "users", "items"):
        if (count := published.get(name)) is not None:
            rule = f"equals the {count:,} {name} known for this source"
            rules.append(_total(name, rule, least=count, most=count, severity="warning", advice=advice))
    return rules


def _relation_rules(
    repeated: Sequence[str], unknown: Sequence[str], config: ValidateConfig, *, foreign: bool
) -> list[gxe.Expectation]:
    """Return the rules about several columns; `foreign`: no item with events is in the items table."""
    advice = "usual for sources with incomplete metadata; models that read text need an entry for each item"
    alike = "both files must write ids alike, with the same leading zeros; or leave the items file out"
    return [
        _total(
            "timestamp (distinct)",
            "at least 2 different times; with one, the order of a sequence is the order of the source's rows",
            least=2,
            severity="warning",
            advice=TIME_ADVICE,
        ),
        _total(
            "user_id, item_id, timestamp (share repeated)",
            f"at most {config.max_duplicate_share:g}",
            most=config.max_duplicate_share,
            advice="raise validate.max_duplicate_share if the repeats are real",
            examples=repeated,
        ),
        _total(
            "item_id (not in items)",
            "every item with interactions is in the items table",
            most=0,
            severity="critical" if foreign else "warning",
            advice=alike if foreign else advice,
            examples=unknown,
        ),
    ]


def _drift_rules(drift: Mapping[str, float], config: ValidateConfig) -> list[gxe.Expectation]:
    if not drift:
        advice = "run `python -m seqrec accept-reference` once you know that the data is good"
        rule, finding = "drift is measured against reference statistics", "no reference statistics accepted yet"
        return [_total("reference", rule, least=1, severity="info", advice=advice, finding=finding)]
    advice = "run `python -m seqrec accept-reference` if the change is wanted, or raise validate.max_drift"
    text = "drift of the events per {} (population stability index) is at most {:g}"
    return [
        _total(
            f"{name} (drift)",
            text.format(name, config.max_drift),
            most=config.max_drift,
            severity="warning",
            advice=advice,
        )
        for name in ("user_id", "item_id")
    ]


def _total(
    name: str, text: str, *, least: float | None = None, most: float | None = None, **texts: Any
) -> gxe.Expectation:
    """Return a rule about the one value of a column of the table of totals."""
    column = f"interactions.{name}"
    return _rule(gxe.ExpectColumnMaxToBeBetween, text, column=column, min_value=least, max_value=most, **texts)


def run(suites: Sequence[Suite]) -> list[Check]:
    """Evaluate the expectations of all `suites`, in order, and return the outcomes.

    Raises:
        ExpectationError: a rule could not be evaluated, e.g. because its column is missing.
    """
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    results, definitions = [], {}  # a data source is slow to add: one for each engine
    for number, suite in enumerate(suites):
        engine, table = "pandas" if isinstance(suite.frame, pd.DataFrame) else "spark", ""
        if engine == "spark":  # which reads a dot in a column name as access to a field
            table = suite.rules[0].column.partition(".")[0]
            for rule in suite.rules:
                rule.column = rule.column.removeprefix(f"{table}.")
        if engine not in definitions:
            sources = context.data_sources
            source = sources.add_pandas(engine) if engine == "pandas" else sources.add_spark(engine)
            definitions[engine] = source.add_dataframe_asset("table").add_batch_definition_whole_dataframe("all")
        batch = definitions[engine].get_batch({"dataframe": suite.frame})
        rules = gx.ExpectationSuite(name=f"suite {number}", expectations=suite.rules)
        shape = {"result_format": "SUMMARY", "partial_unexpected_count": 4 * EXAMPLES}
        found = batch.validate(rules, result_format=shape).results
        for result in found if table else ():
            kwargs = result.expectation_config.kwargs
            kwargs["column"] = f"{table}.{kwargs['column']}"
        results += found
    for result in results:
        _raise_engine_error(result)
    return [_to_check(result.to_json_dict()) for result in results]


def _raise_engine_error(result: gx.core.ExpectationValidationResult) -> None:
    # One record, or one for each metric that failed, under the metric's id.
    info = result.exception_info or {}
    records = [info] if "raised_exception" in info else list(info.values())
    messages = [record["exception_message"] for record in records if record["raised_exception"]]
    if messages:
        config = result.expectation_config
        column = config.kwargs.get("column", "the table")
        raise ExpectationError(f"{config.type} could not be evaluated on {column}: {messages[0]}")


def _to_check(result: Mapping[str, Any]) -> Check:
    config, outcome = result["expectation_config"], result["result"]
    kwargs = config["kwargs"]
    table, _, column = (kwargs.get("column") or kwargs["column_set"][0]).partition(".")
    examples = config["meta"].get("examples") or outcome.get("partial_unexpected_list", [])
    finding = "" if result["success"] else config["meta"].get("finding", "")
    if "unexpected_count" in outcome:
        finding = finding or "{:,} of {:,} values break it"
        observed = finding.format(outcome["unexpected_count"], outcome["element_count"])
    elif finding:
        observed = finding
    else:
        observed = _plain(outcome["observed_value"])
    return Check(
        table=table,
        column=column if "column" in kwargs else "",
        rule=config["description"],
        severity=config["severity"],
        success=result["success"],
        observed=observed,
        examples=[] if result["success"] else list(dict.fromkeys(examples))[:EXAMPLES],
        advice=config["meta"]["advice"],
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):  # of columns
        return ", ".join(name.partition(".")[2] for name in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def to_page(dataset: str, checks: Sequence[Check]) -> str:
    """Return `checks` as a self-contained HTML page: the number of passed rules, and a table, failures first."""
    failed = [check for check in checks if not check.success]
    title = html.escape(f"Validation of {dataset}")
    kind = "bad" if failed else "good"
    banner = f"{len(checks) - len(failed)} of {len(checks)} rules passed"
    heads = "".join(f'<th scope="col">{head}</th>' for head in PAGE_HEADS)
    body = "".join(map(_page_row, sorted(checks, key=lambda check: check.success)))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="banner {kind}" role="status">{banner}</p><h2>Rules</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Rules"><table>'
        f"<caption>Every rule; those that failed come first.</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></body></html>\n"
    )


def _page_row(check: Check) -> str:
    where = f"{check.table}.{check.column}" if check.column else check.table
    outcome = "passed" if check.success else f"failed ({check.severity})"
    found = check.observed + check.shown
    cells = (f"{check.severity}: {check.rule}", outcome, found, "" if check.success else check.advice)
    kind = "good" if check.success else "bad"
    body = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f'<tr class="{kind}"><th scope="row">{html.escape(where)}</th>{body}</tr>'
