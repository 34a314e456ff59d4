"""Stage `register`: the leaderboard, the MLflow runs, and the best model through the gate of the registry.

Every step finds what an earlier, perhaps killed, call has left by its fingerprint, and does only the rest;
the graph alone is exported each time. MLflow, whose import takes seconds, is imported while the export runs.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from seqrec.analysis import examples, report
from seqrec.analysis.examples import Examples
from seqrec.artifacts import (
    CASES,
    CHANGES,
    METRICS,
    MODEL_PREFIX,
    RECOMMENDATIONS,
    REPORT_PAGE,
    SOURCE_CARD,
    SPLIT_CARD,
    VALIDATION,
    WEIGHTS,
    read_json,
    read_table,
    sha256,
    write_json,
    write_text,
)
from seqrec.code_closure import git_commit
from seqrec.config import ConfigError, RegisterConfig
from seqrec.evaluation.leaderboard import (
    LEADERBOARD,
    Row,
    build,
    write_csv,
    write_curves,
    write_summaries,
)
from seqrec.evaluation.leaderboard import write as write_leaderboard
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.tracking import runs, view
from seqrec.tracking.model_card import model_card
from seqrec.tracking.runs import TrackingError
from seqrec.training.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Run

    from seqrec.tracking import registry

logger = logging.getLogger(__name__)

LEADERBOARD_CSV = "leaderboard.csv"
CURVES_CSV = "curves.csv"
FIGURES = "figures.html"  # of a model's run
PARAMS = "params.yaml"  # of the parent run, beside the resolved settings of each model
REPORT_FILES = (METRICS, CASES, RECOMMENDATIONS)
# Of a model card; the rest is outcome.
SETTINGS = ("model", "architecture", "stage", "options", "catalogue", "config", "versions")


@dataclass(frozen=True)
class Entry:
    """A model or baseline, as the earlier stages wrote it."""

    row: Row
    report: Path
    folder: Path  # of its checkpoint, which is read when it is needed: all together may be too large
    card: Mapping[str, Any]
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, Any]]
    fingerprint: str
    content: str  # hash of report and weights

    @property
    def name(self) -> str:
        """Key of the model or baseline."""
        return str(self.row["model"])


@dataclass(frozen=True)
class Tracker:
    """What all runs of this call share."""

    client: MlflowClient
    experiment: str
    split: Mapping[str, Any]
    source: Mapping[str, Any]
    dataset: Dataset
    tags: Mapping[str, str]


def register(
    *,
    leaderboard: Sequence[str],
    artifacts: Path,
    reports: Path,
    sequences: Path,
    data: Path,
    params: Mapping[str, Any],
    config: RegisterConfig,
    pipeline_run: str = "",
) -> dict[str, float]:
    """Write the leaderboard, log one MLflow run per model and baseline under a parent run, and run the gate.

    Args:
        leaderboard: keys of the models.
        artifacts: holds `<model>/finetuned/`.
        reports: folder that holds `<model>/` of models and baselines, and may hold the validation.json of the data; it
            receives leaderboard.json, leaderboard.csv, curves.csv, and index.html, a page that needs no other file.
        sequences: the prepared dataset.
        data: holds source.json.
        params: all of params.yaml, to be logged.
        config: section `register`.
        pipeline_run: the run id of an orchestrator, which becomes a tag of the parent run in MLflow.

    Returns:
        The candidate's metrics, whether it is the champion (1 or 0), and its gain where there was a comparison.

    Raises:
        ConfigError: the prepared dataset is another one than that of `params`, or of a model.
        FileNotFoundError: a model was not trained or not evaluated.
        TrackingError: the tracking server fails; the leaderboard is written, and another call does the rest.
    """
    split = read_json(sequences / SPLIT_CARD)
    if params.get("dataset", split["dataset"]) != split["dataset"]:
        raise ConfigError(f"dataset: the settings name {params['dataset']}, but {sequences} holds {split['dataset']}")
    rows = build(reports=reports, models=leaderboard)
    entries = [_entry(row, artifacts, reports) for row in rows]
    for entry in entries:
        made = entry.card.get("split", {}).get("split_sha256", split["split_sha256"])
        if made != split["split_sha256"]:
            raise ConfigError(f"data: {entry.name} was trained on another split than {sequences} holds")
    best = next((e for e in entries if not (config.allow_below_baseline and e.row["baseline"])), entries[0])
    graph = exporting(best.folder) if config.graph else nullcontext()
    with graph as export, runs.registering(config, split["dataset"]), _explained(reports, config):
        board = write_leaderboard(reports, sequences, rows)
        write_csv(reports / LEADERBOARD_CSV, rows)
        write_summaries(reports / "summary", rows)
        histories = {entry.name: entry.history for entry in entries}
        write_curves(reports / CURVES_CSV, histories)
        shown = examples.choose(
            leader=best.name,
            folders={entry.name: entry.folder for entry in entries},
            reports=reports,
            sequences=sequences,
            number=config.examples,
            seed=config.seed,
        )
        tracker = _connect(split, data, config)
        parent = _open_parent(tracker, entries, params, pipeline_run)
        if changes := os.environ.get(CHANGES):
            tracker.client.set_tag(parent.info.run_id, runs.CHANGES_TAG, changes)
        if pipeline_run:
            tracker.client.set_tag(parent.info.run_id, runs.PIPELINE_RUN, pipeline_run)
        _check_artifacts(tracker.client, parent, reports / LEADERBOARD)
        logged = {entry.name: _log_entry(tracker, entry, parent, shown) for entry in entries}
        outcome = _gate(tracker, best, logged[best.name], sequences, reports / VALIDATION, config, export)
        for entry in entries:
            entry.row["candidate"] = entry is best
            entry.row["champion"] = entry.fingerprint == outcome["champion"]
        board["registry"] = outcome
        write_json(reports / LEADERBOARD, board)
        metrics = {entry.name: entry.metrics for entry in entries}
        write_text(reports / REPORT_PAGE, report.page(board, metrics, histories, shown, _facts(entries, split)))
        gain = board["verdict"]["gain"]
        if outcome["promoted"] and gain and gain["low"] <= 0:
            logger.warning("caution about the champion: %s", board["verdict"]["sentence"])
        _finish_parent(tracker, parent, entries, params, reports, board, pipeline_run)
    gain = {f"gain/{SELECTION}/{name}": value for name, value in (outcome["gain"] or {}).items()}
    chosen = {f"candidate/{key}": best.row[key] for key in (SELECTION, TEST)}
    return {**chosen, "promoted": float(outcome["promoted"]), **gain}


def _entry(row: Row, artifacts: Path, reports: Path) -> Entry:
    name, report = row["model"], reports / row["model"]
    checkpoint = load_checkpoint(artifacts / name / "finetuned")
    files = (*(report / file for file in REPORT_FILES), checkpoint.folder / WEIGHTS)
    return Entry(
        row=row,
        report=report,
        folder=checkpoint.folder,
        card=checkpoint.card,
        metrics=read_json(report / METRICS),
        history=checkpoint.epoch_records(),
        fingerprint=checkpoint.card["fingerprint"],
        content=_hash([sha256(path) for path in files]),
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _facts(entries: Sequence[Entry], split: Mapping[str, Any]) -> dict[str, str]:
    """Return what the page says about its origin: the date of the last evaluation, the commit and the data."""
    evaluated = max((entry.report / METRICS).stat().st_mtime for entry in entries)
    facts = {"evaluated": datetime.fromtimestamp(evaluated, UTC).strftime("%Y-%m-%d")}
    if commit := git_commit():
        facts["commit"] = commit[:8]
    return facts | {name: f"{split['counts'][name]:,}" for name in ("users", "items", "events")}


@contextmanager
def _explained(reports: Path, config: RegisterConfig) -> Iterator[None]:
    """Turn MLflow's failures into one error that says what is already done and what to do next."""
    try:
        with runs.explained(config):
            yield
    except TrackingError as error:
        raise TrackingError(
            f"{error}. The leaderboard is in {reports / LEADERBOARD}; the same command does the rest later"
        ) from error


def _connect(split: Mapping[str, Any], data: Path, config: RegisterConfig) -> Tracker:
    from mlflow.entities import Dataset

    source = read_json(data / SOURCE_CARD)
    client = runs.connect(config)
    origin = {key: str(source.get(key, "")) for key in ("source", "licence")}
    tags = {f"seqrec.{key}": str(split[key]) for key in ("dataset", "protocol")}
    tags |= {f"{runs.HIDDEN}{key}": str(split[key]) for key in ("input_sha256", "split_sha256")}
    dataset = Dataset(
        name=split["dataset"],
        digest=split["split_sha256"][:8],  # as MLflow's own; the tags hold the whole
        source_type="code",
        source=json.dumps({"tags": origin}),
        profile=json.dumps(split["counts"]),
    )
    return Tracker(
        client=client,
        experiment=runs.experiment(client, config),
        split=split,
        source=source,
        dataset=dataset,
        tags={**tags, "seqrec.licence": origin["licence"], **_origin_tags()},
    )


def _origin_tags() -> dict[str, str]:
    """Return user, source, git commit and the hash of dvc.lock, if any, under the names that MLflow shows."""
    lock = Path("dvc.lock")
    tags = {"mlflow.source.name": "seqrec register", "mlflow.source.type": "LOCAL", "mlflow.user": _user()}
    tags |= {f"{runs.HIDDEN}dvc_lock": sha256(lock)} if lock.is_file() else {}
    if commit := git_commit():
        return {**tags, "mlflow.source.git.commit": commit}
    logger.warning("no git commit is recorded, because the project is not in a git repository")
    return tags


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


def _open_parent(tracker: Tracker, entries: Sequence[Entry], params: Mapping[str, Any], pipeline_run: str) -> Run:
    """Return the run of this pipeline: the orchestrator's if there is one, else one found or made by fingerprint."""
    made = [(entry.fingerprint, entry.content) for entry in entries]
    content = _hash([tracker.split["split_sha256"], params, made, *([pipeline_run] if pipeline_run else [])])
    injected = runs.injected_run()
    if injected is None:
        name = f"{tracker.split['dataset']}-{content[:8]}"
        return runs.open_run(tracker.client, tracker.experiment, content, name, seconds=_elapsed(tracker, entries))
    tracker.client.set_tag(injected, runs.FINGERPRINT, content)
    return tracker.client.get_run(injected)


def _elapsed(tracker: Tracker, entries: Sequence[Entry]) -> float:
    """Return how long ago the first of the trainings began: the parent spans its children."""
    begun = [runs.find_run(tracker.client, tracker.experiment, entry.fingerprint) for entry in entries]
    ages = [time.time() - run.info.start_time / 1000 for run in begun if run is not None]
    return float(max([*ages, *(entry.card["seconds"] for entry in entries)])) + 1


def _check_artifacts(client: MlflowClient, run: Run, path: Path) -> None:
    """Store a file and fetch it again, so that a server with a wrong artifact store fails here and not later."""
    from mlflow.exceptions import MlflowException

    try:
        client.log_artifact(run.info.run_id, str(path))
        with tempfile.TemporaryDirectory() as directory:
            same = sha256(Path(client.download_artifacts(run.info.run_id, path.name, directory))) == sha256(path)
    except (MlflowException, OSError) as error:
        raise TrackingError(
            f"register.tracking_uri: artifacts cannot be stored under {run.info.artifact_uri} ({error}); start the "
            "server with --serve-artifacts, or give this machine access to that location"
        ) from error
    if not same:
        raise TrackingError(
            f"register.tracking_uri: {run.info.artifact_uri} returned a {path.name} that differs from the stored one"
        )


def _log_entry(tracker: Tracker, entry: Entry, parent: Run, shown: Examples) -> Run:
    """Return the entry's run, complete: settings, dataset, curves, figures, report, model and final values."""
    from seqrec.tracking import registry

    client, seconds = tracker.client, entry.card["seconds"]
    run = runs.open_run(
        client, tracker.experiment, entry.fingerprint, entry.name, parent=parent.info.run_id, seconds=seconds
    )
    if run.data.tags.get(runs.COMPLETE) == entry.content:
        return run
    run_id = run.info.run_id
    settings = {key: entry.card[key] for key in SETTINGS}
    kind = "baseline" if entry.row["baseline"] else "model"
    tags = {runs.KIND: kind, "seqrec.architecture": entry.card["architecture"], view.NOTE: _about(entry, tracker)}
    _describe(tracker, run, settings, tags)
    for file in REPORT_FILES:
        client.log_artifact(run_id, str(entry.report / file), registry.REPORT)
    if entry.history:
        page = report.model_page(entry.name, entry.history, shown, entry.row[SELECTION])
        client.log_text(run_id, page, FIGURES)
    model_id = None
    if not entry.row["baseline"]:  # the model of a baseline is logged if it is the candidate
        model_id = registry.log_model(client, run, checkpoint=load_checkpoint(entry.folder)).model_id
    values = view.scalars(entry.metrics) | view.best_epoch(entry.history)
    runs.log_metrics(client, run, values, entry.history, model_id=model_id, dataset=tracker.dataset)
    client.set_terminated(run_id)
    client.set_tag(run_id, runs.COMPLETE, entry.content)
    return run


def _about(entry: Entry, tracker: Tracker) -> str:
    value, low, high = (entry.row[f"{TEST}{end}"] for end in ("", "/low", "/high"))
    return (
        f"{entry.name} on {tracker.split['dataset']}: {TEST} {value:.4f} [{low:.4f}, {high:.4f}]. The report is "
        f"`{REPORT_PAGE}` among the artifacts of the parent run, which compares all models."
    )


def _describe(tracker: Tracker, run: Run, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    from mlflow.entities import DatasetInput, InputTag

    inputs = [DatasetInput(tracker.dataset, [InputTag("mlflow.data.context", "training")])]
    tracker.client.log_inputs(run.info.run_id, inputs)
    runs.log_params(tracker.client, run, settings, {**tracker.tags, **tags})


@contextmanager
def exporting(saved: Path) -> Iterator[registry.Export]:
    """Write the ONNX graph of a checkpoint in a process beside this one; yield what waits for it and copies it."""
    fork = sys.platform == "linux" and not torch.cuda.is_available()  # it has imported torch, but can use no GPU
    how = multiprocessing.get_context("fork" if fork else "spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, how) as pool:
        written = pool.submit(_export, saved, Path(folder))

        def export(target: Path) -> None:
            written.result()
            shutil.copytree(folder, target)

        yield export


def _export(saved: Path, folder: Path) -> None:
    from seqrec.serving import onnx_graph  # needs the packages of the extra `serve`

    torch.set_num_threads(1)  # of a fork, which has no others
    onnx_graph.export_checkpoint(load_checkpoint(saved), folder)


def _gate(
    tracker: Tracker,
    best: Entry,
    run: Run,
    sequences: Path,
    validation: Path,
    config: RegisterConfig,
    export: registry.Export | None,
) -> dict[str, Any]:
    """Register `best` as the candidate, and return the gate's decision in the form of leaderboard.json."""
    from seqrec.tracking import gate, registry

    name = MODEL_PREFIX + tracker.split["dataset"]
    tags = {
        **tracker.tags,
        "seqrec.model": best.name,
        registry.FILTER_TAG: str(best.metrics["filter_seen"]),
        gate.VALUE_TAG: str(best.row[SELECTION]),
        **gate.guard_tags(best.metrics),
    }
    if validation.is_file():  # not with `run --data`
        tags[registry.STATISTICS_TAG] = json.dumps(read_json(validation)["histograms"])
    checkpoint = load_checkpoint(best.folder)
    model = registry.log_model(tracker.client, run, checkpoint=checkpoint)
    if export:
        registry.log_graph(tracker.client, model, export)
    about = (
        f"Next-item recommenders for {tracker.split['dataset']} ({tracker.split['protocol']}), one version per training"
        f". `{registry.CHAMPION}` is the version to serve, `{registry.CANDIDATE}` the best of the last run."
    )
    description = model_card(best.card, best.metrics, tracker.split, tracker.source)
    version = registry.create_version(tracker.client, name, model, tags, description)
    tracker.client.update_registered_model(name, about)
    tracker.client.set_registered_model_alias(name, registry.CANDIDATE, version.version)
    decision = gate.promote(tracker.client, version, read_table(best.report / CASES), sequences, config)
    champion = registry.find_evaluated(tracker.client, name)
    return {
        "registered_model": name,
        "version": int(version.version),
        "model": best.name,
        "promoted": decision.promoted,
        "reason": decision.reason,
        "gain": decision.gain and decision.gain._asdict(),
        "champion": champion and champion.tags.get(runs.FINGERPRINT),
    }


def _finish_parent(
    tracker: Tracker,
    run: Run,
    entries: Sequence[Entry],
    params: Mapping[str, Any],
    reports: Path,
    board: Mapping[str, Any],
    pipeline_run: str,
) -> None:
    client, run_id = tracker.client, run.info.run_id
    rows, outcome = [entry.row for entry in entries], board["registry"]
    for file in (LEADERBOARD, REPORT_PAGE):
        client.log_artifact(run_id, str(reports / file))
    verdict = f"{outcome['model']} is {'' if outcome['promoted'] else 'not '}the champion: {outcome['reason']}"
    verdict = f"{board['verdict']['sentence']}\n\n{verdict}"
    client.set_tag(run_id, view.NOTE, view.note(rows, verdict, reports / REPORT_PAGE))
    view.share(client, tracker.experiment, run_id)
    if not run.data.tags.get(runs.COMPLETE):
        settings = {"dataset": tracker.split["dataset"], "protocol": tracker.split["protocol"]}
        settings["leaderboard"] = ", ".join(entry.name for entry in entries)
        _describe(tracker, run, settings, {runs.KIND: "pipeline run"})
        client.log_text(run_id, yaml.safe_dump(dict(params), sort_keys=False), PARAMS)
        runs.log_metrics(client, run, view.leaders(rows))
    if runs.injected_run() is None and run.info.status != "FINISHED":  # whoever made the run ends it
        client.set_terminated(run_id)
    client.set_tag(run_id, runs.COMPLETE, pipeline_run or "true")
