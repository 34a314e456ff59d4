"""The gate between `candidate` and `champion`: what a model must show before it is served."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from seqrec.artifacts import CASES, read_table
from seqrec.config import RegisterConfig
from seqrec.evaluation import intervals
from seqrec.evaluation.leaderboard import SELECTION
from seqrec.tracking import registry
from seqrec.tracking.runs import TrackingError, metric_name

ATTEMPTS = 10
GUARDED = ("valid/coverage@10", "valid/ndcg@10/popularity=tail")  # metrics that a gain must not reduce
COMPARABLE = {registry.SPLIT_TAG: "split", registry.FILTER_TAG: "evaluate.filter_seen"}
VALUE_TAG = f"seqrec.{metric_name(SELECTION)}"
BASELINE_TAG, BASELINE_VALUE_TAG = "seqrec.baseline", f"seqrec.baseline.{metric_name(SELECTION)}"


class Decision(NamedTuple):
    """The gate's decision on a candidate."""

    promoted: bool
    reason: str
    gain: intervals.Interval | None  # of valid/ndcg@10 over the champion; None where there was nothing to compare


def promote(client: MlflowClient, version: ModelVersion, cases: pa.Table, config: RegisterConfig) -> Decision:
    """Give `version` the alias `champion` if it passes the gate, and record decision, interval and reason as tags.

    The champion is replaced if the paired interval of the gain on validation lies above `register.min_gain` and no
    metric of `GUARDED` loses more than `register.max_loss`. It is also replaced if the two were not measured on the
    same cases and cannot be compared. If two promotions happen at the same time, each is decided again after the other,
    so the better one stays. A model below the best baseline is never promoted, unless `register.allow_below_baseline`;
    nor is one that was rolled back.

    Raises:
        TrackingError: the champion's validation cases cannot be fetched, or others promote without end.
    """
    for _ in range(ATTEMPTS):
        with registry.claim(client, version.name) as still_ours:
            champion, evaluated = (
                registry.find_champion(client, version.name),
                registry.find_evaluated(client, version.name),
            )
            if evaluated is not None and str(evaluated.version) == str(version.version):
                return _recorded(version)
            decision = _decide(client, version, champion, cases, config)
            if not still_ours():
                continue
            tags = {
                registry.PROMOTED_TAG: str(decision.promoted).lower(),
                registry.REASON_TAG: decision.reason,
                registry.GAIN_TAG: json.dumps(decision.gain),
            }
            for key, value in tags.items():
                client.set_model_version_tag(version.name, version.version, key, value)
            if decision.promoted:
                registry.crown(client, version, champion, decision.reason)
            if still_ours():
                return decision
    raise TrackingError(f"{version.name}: other promotions came first {ATTEMPTS} times in a row; run register again")


def _recorded(version: ModelVersion) -> Decision:
    """Return the decision that made `version` the champion."""
    if version.tags.get(registry.PROMOTED_TAG) != "true":
        return Decision(True, "the alias was set by hand", None)
    gain = json.loads(version.tags[registry.GAIN_TAG])
    return Decision(True, version.tags[registry.REASON_TAG], gain and intervals.Interval(*gain))


def _decide(
    client: MlflowClient,
    version: ModelVersion,
    champion: ModelVersion | None,
    cases: pa.Table,
    config: RegisterConfig,
) -> Decision:
    if by := version.tags.get(registry.WITHDRAWN_TAG):
        return Decision(
            False, f"it was rolled back to version {by}; promote it by hand if it shall be served again", None
        )
    if not config.allow_below_baseline and (below := _below_baseline(version)):
        return Decision(False, below, None)
    if champion is None:
        return Decision(True, "the first champion", None)
    changed = [what for tag, what in COMPARABLE.items() if champion.tags.get(tag) != version.tags.get(tag)]
    if changed:
        reason = f"version {champion.version} was measured with another {' and '.join(changed)}: not comparable"
        return Decision(True, reason, None)
    other = _fetch_cases(client, registry.find_evaluated(client, version.name) or champion)
    try:
        gain = intervals.paired_gain(cases, other, confidence=config.confidence, seed=config.seed)
    except ValueError as error:
        return Decision(True, f"not comparable with version {champion.version}: {error}", None)
    promoted = gain.low > config.min_gain
    lost = _lost(version, champion, config.max_loss)
    reason = (
        f"gain of valid/ndcg@10 over version {champion.version}: {gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}], "
        f"{'above' if promoted else 'not clearly above'} register.min_gain = {config.min_gain:g}"
    )
    return Decision(promoted and not lost, "; ".join([reason, *lost]), gain)


def guard_tags(values: Mapping[str, float]) -> dict[str, str]:
    """Return the tags of a version that hold its `GUARDED` metrics."""
    return {f"seqrec.{metric_name(name)}": str(values[name]) for name in GUARDED if name in values}


def baseline_tags(name: str, value: float) -> dict[str, str]:
    """Return the tags of a version that hold the best baseline and its `SELECTION`."""
    return {BASELINE_TAG: name, BASELINE_VALUE_TAG: str(value)}


def _below_baseline(version: ModelVersion) -> str:
    """Return why `version` is not worth serving; empty if it is, or if a tag is missing."""
    ours, baseline = version.tags.get(VALUE_TAG), version.tags.get(BASELINE_VALUE_TAG)
    if ours is None or baseline is None or float(ours) >= float(baseline):
        return ""
    return (
        f"{SELECTION} {float(ours):.4f} is below the best baseline, {version.tags.get(BASELINE_TAG)} "
        f"({float(baseline):.4f}); register.allow_below_baseline lets it through"
    )


def _lost(version: ModelVersion, champion: ModelVersion, most: float) -> list[str]:
    """Return in words which `GUARDED` metrics of the champion were clearly better."""
    lost = []
    for name in GUARDED:
        ours, theirs = (v.tags.get(f"seqrec.{metric_name(name)}") for v in (version, champion))
        if ours is not None and theirs is not None and float(ours) < float(theirs) * (1 - most):
            lost.append(f"but {name} falls from {float(theirs):.4f} to {float(ours):.4f}, register.max_loss = {most:g}")
    return lost


def _fetch_cases(client: MlflowClient, champion: ModelVersion) -> pa.Table:
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = client.download_artifacts(champion.run_id, f"{registry.REPORT}/{CASES}", directory)
        except (MlflowException, OSError) as error:
            raise TrackingError(
                f"register.tracking_uri: {CASES} of the champion, version {champion.version} of {champion.name}, "
                f"cannot be fetched ({error}); restore its run, or remove the alias {registry.CHAMPION} to choose "
                "a new one"
            ) from error
        return read_table(Path(path))
