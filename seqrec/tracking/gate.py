"""The gate between `candidate` and `champion`: what a model must show before it is served."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from seqrec.artifacts import CASES, REFIT, read_table
from seqrec.config import RegisterConfig
from seqrec.evaluation import intervals
from seqrec.evaluation.metrics import SELECTION
from seqrec.tracking import other_catalogue, registry
from seqrec.tracking.other_catalogue import Measured
from seqrec.tracking.runs import TrackingError, metric_name
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.held_out import held_out_now

logger = logging.getLogger(__name__)
ATTEMPTS = 10
GUARDED = ("valid/coverage@10", "valid/ndcg@10/popularity=tail")  # metrics that a gain must not reduce
COMPARABLE = {registry.SPLIT_TAG: "split", registry.FILTER_TAG: "filter_seen"}
VALUE_TAG = f"seqrec.{metric_name(SELECTION)}"


class Decision(NamedTuple):
    """The gate's decision on a candidate."""

    promoted: bool
    reason: str
    gain: intervals.Interval | None  # of valid/ndcg@10 over the champion; None where there was nothing to compare


def promote(
    client: MlflowClient, version: ModelVersion, cases: pa.Table, sequences: Path, config: RegisterConfig
) -> Decision:
    """Give `version` the alias `champion` if it passes the gate, and record decision, interval and reason as tags.

    The champion is replaced if the paired interval of the gain on validation lies above `register.min_gain` and no
    metric of `GUARDED` loses more than `register.max_loss`. A champion of another split or `filter_seen` is
    first measured on the cases of `version`; where that is impossible or unfair, it stays until a person decides. If
    another promotion begins during this one, this one is decided again after it; only of two machines that set the
    alias in the same moment, the later one wins. A model that was rolled back is never promoted.

    `cases` has the ranks of the candidate (artifacts.CASES_SCHEMA) on the prepared dataset in `sequences`.

    Raises:
        TrackingError: the champion's validation cases cannot be fetched, or others promote without end.
    """
    for _ in range(ATTEMPTS):
        still_ours = registry.claim(client, version.name)
        champion = registry.find_champion(client, version.name)
        evaluated = registry.find_evaluated(client, version.name)
        if evaluated is not None and registry.is_same(evaluated, version):
            recorded = _recorded(evaluated)
            if champion is None or registry.is_same(champion, evaluated):
                return recorded
            return recorded._replace(reason=f"version {champion.version}, its refit, is served; {recorded.reason}")
        decision = _decide(client, version, champion, evaluated, cases, sequences, config)
        tags = {
            registry.PROMOTED_TAG: str(decision.promoted).lower(),
            registry.REASON_TAG: decision.reason,
            registry.GAIN_TAG: json.dumps(decision.gain),
        }
        for key, value in tags.items():
            client.set_model_version_tag(version.name, version.version, key, value)
        if not still_ours():
            continue
        if decision.promoted:
            registry.crown(client, version, champion, decision.reason)
        if still_ours():
            return decision
    raise TrackingError(
        f"{version.name}: another version was promoted first, {ATTEMPTS} times in a row; run register again"
    )


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
    evaluated: ModelVersion | None,
    cases: pa.Table,
    sequences: Path,
    config: RegisterConfig,
) -> Decision:
    """Decide on `version`; `evaluated` is the version whose evaluation is the champion's."""
    if by := version.tags.get(registry.WITHDRAWN_TAG):
        reason = f"it was rolled back to version {by}; promote it by hand to serve it again"
        return Decision(False, reason, None)
    if champion is None or evaluated is None:
        return Decision(True, "there was no champion before", None)
    changed = [what for tag, what in COMPARABLE.items() if evaluated.tags.get(tag) != version.tags.get(tag)]
    found = None if changed else _stored(client, evaluated)
    another = f" (measured with another {' and '.join(changed)})" if changed else ""
    try:
        found = found or _measured_again(evaluated, version, sequences, config)
        gain = intervals.paired_gain(cases, found.cases, confidence=config.confidence, seed=config.seed)
    except ValueError as error:
        reason = f"not comparable with version {champion.version}{another}: {error}"
        by_hand = f"python -m seqrec registry promote --version {version.version}"
        return Decision(False, f"{reason}; to promote it anyway: {by_hand}", None)
    promoted = gain.low > config.min_gain
    lost = _lost(_guards(version), found.values, config.max_loss)
    how = ""
    if changed:
        new = f"{found.new_items} items and {found.new_users} users are new to it"
        how = f"{another}, measured again on these cases ({new})"
    reason = (
        f"gain of valid/ndcg@10 over version {champion.version}{how}: {gain}, "
        f"{'above' if promoted else 'not clearly above'} register.min_gain = {config.min_gain:g}"
    )
    if lost:
        reason += ("; but " if promoted else "; ") + "; ".join(lost)
    return Decision(promoted and not lost, reason, gain)


def _measured_again(champion: ModelVersion, version: ModelVersion, sequences: Path, config: RegisterConfig) -> Measured:
    """Return what the champion's weights reach on the validation cases of `version`.

    Raises:
        ValueError: the weights cannot be had, do not fit, or may have been trained on these cases.
    """
    logger.info("ranking the validation cases with version %s of %s", champion.version, champion.name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            registry.fetch(f"models:/{champion.name}/{champion.version}", Path(folder), config)
            checkpoint = load_checkpoint(Path(folder))
            if REFIT in checkpoint.card:
                raise ValueError("its weights were refitted on events that may now be held out")
            if why := held_out_now(checkpoint, sequences):
                raise ValueError(why)
            return other_catalogue.measured(checkpoint, sequences, filter_seen=version.tags[registry.FILTER_TAG] == "1")
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(f"{folder}/", "")) from error


def guard_tags(values: Mapping[str, float]) -> dict[str, str]:
    """Return the tags of a version that hold its `GUARDED` metrics."""
    return {f"seqrec.{metric_name(name)}": str(values[name]) for name in GUARDED if name in values}


def _guards(version: ModelVersion) -> dict[str, float]:
    """Return the `GUARDED` metrics in the tags of a version."""
    tags = {name: version.tags.get(f"seqrec.{metric_name(name)}") for name in GUARDED}
    return {name: float(value) for name, value in tags.items() if value is not None}


def _lost(ours: Mapping[str, float], theirs: Mapping[str, float], most: float) -> list[str]:
    """Return in words which `GUARDED` metrics of the champion, `theirs`, were clearly better."""
    return [
        f"{name} falls from {theirs[name]:.4f} to {ours[name]:.4f}, register.max_loss = {most:g}"
        for name in GUARDED
        if name in ours and name in theirs and ours[name] < theirs[name] * (1 - most)
    ]


def _stored(client: MlflowClient, champion: ModelVersion) -> Measured:
    """Return what the champion's run says of the validation cases."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = client.download_artifacts(champion.run_id, f"{registry.REPORT}/{CASES}", directory)
        except (MlflowException, OSError) as error:
            raise TrackingError(
                f"register.tracking_uri: {CASES} of the champion, version {champion.version} of {champion.name}, "
                f"cannot be fetched ({error}); restore its run, or remove the alias {registry.CHAMPION} to choose "
                "a new one"
            ) from error
        return Measured(cases=read_table(Path(path)), values=_guards(champion))
