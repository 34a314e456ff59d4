"""The model registry: what a version holds, and which one is the champion."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, Run
from mlflow.entities.logged_model_status import LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType, Array

from seqrec.artifacts import (
    COUNTS,
    GRAPH,
    GRAPH_CARD,
    MODEL_CARD,
    MODEL_PREFIX,
    REFIT,
    ROOT,
    TOKENS,
    WEIGHTS,
    write_text,
)
from seqrec.config import ConfigError, RegisterConfig
from seqrec.redaction import redacted
from seqrec.tracking import runs
from seqrec.tracking.runs import TrackingError
from seqrec.training.saved import FILES, Saved

logger = logging.getLogger(__name__)

CANDIDATE, CHAMPION = "candidate", "champion"
REFERENCE = "reference"  # alias of the version whose data drift is measured against, if not the champion
REPORT = "report"  # artifact folder of a run
ARTIFACTS = "artifacts"  # folder of a logged model, where MLflow lays what a pyfunc model reads
WEIGHTS_TAG, SPLIT_TAG, FILTER_TAG = f"{runs.HIDDEN}weights_sha256", f"{runs.HIDDEN}split_sha256", "seqrec.filter_seen"
PROMOTED_TAG, REASON_TAG, GAIN_TAG = "seqrec.promoted", "seqrec.reason", "seqrec.gain"
WITHDRAWN_TAG = "seqrec.withdrawn"  # of a champion that was rolled back: by which version
STATISTICS_TAG = "seqrec.statistics"  # of a version: the histograms of its data that `validate` made
REFIT_TAG = "seqrec.refit_of"  # of a refit: the evaluated version whose training it repeats on every event
OWN_TAGS = (PROMOTED_TAG, REASON_TAG, GAIN_TAG, WITHDRAWN_TAG, WEIGHTS_TAG, runs.FINGERPRINT)  # no refit shares them
CLAIM_TAG = "seqrec.claim"  # of a registered model: who began a promotion last
AUDIT_TIME = "%Y-%m-%dT%H%M%S.%f"  # UTC
AUDIT_TAG = "seqrec.audit."  # of a registered model, one a change of champion; the time follows
VERSIONS_TAG = "mlflow.modelVersions"  # of a logged model: MLflow's pages link it to these
LONGEST = 5_000  # characters of a description that MLflow keeps
# What the model imports: pinned as installed here, local builds (`+cpu`) by their public version.
PACKAGES = ("mlflow", "numpy", "pandas", "pyarrow", "pyyaml", "safetensors", "torch")
PYFUNC = ROOT / "seqrec" / "serving" / "pyfunc_model.py"
Export = Callable[[Path], object]
SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec(Array(DataType.string), "history"),
            ColSpec(DataType.long, "k", required=False),
            ColSpec(DataType.string, "user", required=False),
            ColSpec(Array(DataType.string), "exclude", required=False),
            ColSpec(AnyType(), "times", required=False),  # MLflow does not turn whole numbers into others
            ColSpec(AnyType(), "at", required=False),
        ]
    ),
    outputs=Schema(
        [
            ColSpec(Array(DataType.string), "items"),
            ColSpec(Array(DataType.double), "scores"),
            ColSpec(DataType.string, "source"),
            ColSpec(DataType.long, "unknown"),
        ]
    ),
)


def log_model(client: MlflowClient, run: Run, *, checkpoint: Saved) -> LoggedModel:
    """Return the run's loadable model of the weights of `checkpoint`; a half-written one is replaced."""
    card, saved = checkpoint.card, checkpoint.folder
    weights = card["weights_sha256"]
    experiment, run_id = run.info.experiment_id, run.info.run_id
    for model in client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'"):
        if model.status != LoggedModelStatus.READY:
            client.delete_logged_model(model.model_id)
        elif model.tags.get(WEIGHTS_TAG) == weights:
            return model
    tags = {WEIGHTS_TAG: weights, runs.FINGERPRINT: run.data.tags[runs.FINGERPRINT]}
    params = client.get_run(run_id).data.params
    name = re.sub(r"""[/:.%"']""", "_", run.info.run_name)  # MLflow refuses these here
    model = client.create_logged_model(experiment, name, run_id, tags=tags, params=params)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        mlflow.pyfunc.save_model(
            folder,
            mlflow_model=Model(run_id=run_id, model_id=model.model_id),
            python_model=str(PYFUNC),
            artifacts={
                "weights": str(saved / WEIGHTS),
                "card": str(saved / MODEL_CARD),
                **{Path(name).stem: str(saved / name) for name in card["files"]},
                **({"tokens": str(saved / TOKENS)} if "tokens_sha256" in card else {}),
                **({"counts": str(saved / COUNTS)} if "sha256" in card["counts"] else {}),
            },
            code_paths=[str(ROOT / "seqrec")],
            pip_requirements=[f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES],
            signature=SIGNATURE,
            input_example=_example(checkpoint.item_ids),
        )
        client.log_model_artifacts(model.model_id, str(folder))
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def log_graph(client: MlflowClient, model: LoggedModel, export: Export) -> None:
    """Add the ONNX graph that `export` writes into a folder to a logged model, if it has none; `serve` runs it.

    A model that cannot be exported goes without one, and a warning says why.
    """
    if any(
        Path(file.path).name == GRAPH_CARD for file in client.list_logged_model_artifacts(model.model_id, ARTIFACTS)
    ):
        return
    with tempfile.TemporaryDirectory() as directory:
        folder, last = Path(directory, "graph"), Path(directory, "card")
        try:
            export(folder / ARTIFACTS)
        except Exception as error:  # whatever a converter may raise; the weights answer as well
            reason = f"{type(error).__name__}: {runs.first_line(error)}"
            logger.warning("%s has no ONNX graph and is served by torch (%s)", model.name, reason)
            return
        (last / ARTIFACTS).mkdir(parents=True)
        (folder / ARTIFACTS / GRAPH_CARD).rename(last / ARTIFACTS / GRAPH_CARD)
        for part in (folder, last):  # a graph without its card is not used, and is uploaded again
            client.log_model_artifacts(model.model_id, str(part))


def _example(item_ids: list[str]) -> pd.DataFrame:
    items = item_ids[:3]
    times = list(range(0, 60 * len(items), 60))  # only some models read them
    return pd.DataFrame({"history": [items, items[:1]], "times": [times, times[:1]], "k": [5, 5]})


def create_version(
    client: MlflowClient, name: str, model: LoggedModel, tags: Mapping[str, str], description: str = ""
) -> ModelVersion:
    """Return the version of `name` that holds `model`'s weights; `tags` and `description` are updated."""
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    version = _find_version(client, name, model)
    if version is None:
        version = client.create_model_version(
            name,
            source=f"models:/{model.model_id}",
            run_id=model.source_run_id,
            model_id=model.model_id,
            tags={**tags, **{key: model.tags[key] for key in (runs.FINGERPRINT, WEIGHTS_TAG)}},
        )
    versions = json.dumps([{"name": name, "version": int(version.version)}])
    if VERSIONS_TAG not in model.tags:
        client.set_logged_model_tags(model.model_id, {VERSIONS_TAG: versions})
    for key, value in tags.items():
        if version.tags.get(key) != value:
            client.set_model_version_tag(name, version.version, key, value)
    if version.description != description[:LONGEST]:
        client.update_model_version(name, version.version, description[:LONGEST])
    return client.get_model_version(name, version.version)


def _find_version(client: MlflowClient, name: str, model: LoggedModel) -> ModelVersion | None:
    fingerprint = model.tags[runs.FINGERPRINT]
    versions = client.search_model_versions(f"name = '{name}' and tags.`{runs.FINGERPRINT}` = '{fingerprint}'")
    wanted = model.tags[WEIGHTS_TAG], f"models:/{model.model_id}"  # the model of an older version may be deleted
    return next((one for one in versions if (one.tags.get(WEIGHTS_TAG), one.source) == wanted), None)


def claim(client: MlflowClient, name: str) -> Callable[[], bool]:
    """Say that a promotion of `name` begins; return what says whether no other one has begun since."""
    ours = uuid.uuid4().hex
    client.set_registered_model_tag(name, CLAIM_TAG, ours)
    return lambda: client.get_registered_model(name).tags.get(CLAIM_TAG) == ours


def crown(
    client: MlflowClient, version: ModelVersion, champion: ModelVersion | None, reason: str, *, back: bool = False
) -> None:
    """Make `version` the champion in place of `champion`, and write it with the reason into the audit trail.

    With `back` this is a rollback: neither the gate nor a further rollback makes `champion` the champion again.
    """
    name, before = version.name, "none" if champion is None else str(champion.version)
    if back and champion is not None:
        client.set_model_version_tag(name, champion.version, WITHDRAWN_TAG, str(version.version))
    elif WITHDRAWN_TAG in version.tags:
        client.delete_model_version_tag(name, version.version, WITHDRAWN_TAG)
    client.set_registered_model_alias(name, CHAMPION, version.version)
    moment = datetime.now(UTC).strftime(AUDIT_TIME)
    client.set_registered_model_tag(name, f"{AUDIT_TAG}{moment}", f"{before} -> {version.version}: {reason}"[:4000])


def champion_history(model: RegisteredModel) -> list[str]:
    """Return the champions in the audit trail of `model`, the latest first and some more than once."""
    changes = reversed(_changes(model))
    return [number for before, after, _ in changes for number in (after, before) if number != "none"]


def rolled_back(model: RegisteredModel) -> set[str]:
    """Return the versions that were rolled back, by the audit trail of `model`, and not promoted since."""
    found: set[str] = set()
    for before, after, reason in _changes(model):
        found.discard(after)
        if reason.startswith("rollback"):
            found.add(before)
    return found


def _changes(model: RegisteredModel) -> list[tuple[str, str, str]]:
    """Return the audit trail of `model`, oldest first: champion before, champion after, and reason of each change."""
    entries = [text for key, text in sorted(model.tags.items()) if key.startswith(AUDIT_TAG)]
    return [(*change.split(" -> "), reason) for change, _, reason in (entry.partition(": ") for entry in entries)]


def find_champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """Return the version that holds the alias `champion`, if `name` is registered and any does."""
    return _find_alias(client, name, CHAMPION)


def _find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    if not client.search_registered_models(f"name = '{name}'"):
        return None
    number = client.get_registered_model(name).aliases.get(alias)
    return None if number is None else client.get_model_version(name, number)


def is_same(version: ModelVersion | None, other: ModelVersion | None) -> bool:
    """Return whether both are the same version, or both None; stores name versions by numbers or by texts."""
    numbers = [None if one is None else str(one.version) for one in (version, other)]
    return numbers[0] == numbers[1]


def find_evaluated(client: MlflowClient, name: str) -> ModelVersion | None:
    """Return the version whose evaluation is the champion's: itself, or what it was refitted from.

    Raises:
        TrackingError: the version that the champion was refitted from was deleted.
    """
    champion = find_champion(client, name)
    if champion is None or REFIT_TAG not in champion.tags:
        return champion
    origin = champion.tags[REFIT_TAG]
    try:
        return client.get_model_version(name, origin)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise TrackingError(
            f"version {origin} of {name}, from which the champion, version {champion.version}, was refitted, was "
            f"deleted: promote another version, or remove the alias {CHAMPION} to choose a new one"
        ) from error


def register_refit(
    client: MlflowClient,
    evaluated: ModelVersion,
    *,
    checkpoint: Saved,
    export: Export | None,
    config: RegisterConfig,
) -> ModelVersion:
    """Log what `checkpoint` holds as a version linked to `evaluated`, and make it the champion in its place.

    `export` writes its ONNX graph, if it is to have one; see `log_graph`.

    Raises:
        TrackingError: the champion has changed in the meantime.
    """
    card, name, origin = checkpoint.card, evaluated.name, client.get_run(evaluated.run_id)
    title, parent = f"{origin.info.run_name}-refit", origin.data.tags.get(runs.PARENT)
    experiment_id = runs.experiment(client, config)
    run = runs.open_run(client, experiment_id, card["fingerprint"], title, parent=parent, seconds=card["seconds"])
    runs.log_params(client, run, {key: card[key] for key in ("options", "config", REFIT)})
    runs.log_metrics(client, run, {}, checkpoint.epoch_records())
    model = log_model(client, run, checkpoint=checkpoint)
    reason = f"refit of version {evaluated.version} on every event"
    if export:
        log_graph(client, model, export)
    tags = {key: value for key, value in evaluated.tags.items() if key not in OWN_TAGS}
    tags |= {REFIT_TAG: str(evaluated.version), REASON_TAG: reason}
    epochs = f"epochs {card[REFIT]['epochs']}, " if card[REFIT]["epochs"] else ""
    notice = (
        f"**A {reason}, test events included: {epochs}weights `{card['weights_sha256']}`. The "
        f"text below describes version {evaluated.version}; these weights cannot be measured on that split.**\n\n"
    )
    version = create_version(client, name, model, tags, notice + (evaluated.description or ""))
    client.set_terminated(run.info.run_id)
    if WITHDRAWN_TAG in version.tags:
        raise TrackingError(
            f"version {version.version} of {name}, this refit, was rolled back: "
            f"`seqrec registry promote --version {version.version}` makes it the champion again"
        )
    still_ours = claim(client, name)
    champion, now = find_champion(client, name), find_evaluated(client, name)
    if not is_same(now, evaluated) or not still_ours():
        raise TrackingError(f"version {evaluated.version} of {name} is no longer the champion: refit the new champion")
    if not is_same(champion, version):
        crown(client, version, champion, reason)
    return version


def alias_version(*, name: str, alias: str, config: RegisterConfig) -> str:
    """Return the version of the registered model `name` that holds `alias`, or nothing.

    The service asks again and again: a SQLite file that was replaced is read anew, and none is created.

    Raises:
        TrackingError: the server does not answer.
    """
    if runs.is_missing(config):
        return ""
    if runs.sqlite_path(runs.tracking_uri(config)):
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")  # others would keep the replaced one open
    with runs.explained(config):
        version = _find_alias(runs.connect(config), name, alias)
    return "" if version is None else str(version.version)


def datasets(config: RegisterConfig) -> list[str]:
    """Return the datasets that have a registered model; a SQLite file that is missing has none, and is not created.

    Raises:
        TrackingError: the server does not answer.
    """
    if runs.is_missing(config):
        return []
    with runs.explained(config):
        models = runs.connect(config).search_registered_models(f"name LIKE '{MODEL_PREFIX}%'")
    return [model.name.removeprefix(MODEL_PREFIX) for model in models]


def reference_statistics(*, dataset: str, config: RegisterConfig) -> dict[str, Any]:
    """Return the histograms that drift of `dataset` is measured against, or nothing if there is no version yet.

    They are those of the data of the version with the alias `reference`, or else of the champion.

    Raises:
        TrackingError: the server does not answer.
    """
    client, name = runs.connect(config), MODEL_PREFIX + dataset
    with runs.explained(config):
        version = _find_alias(client, name, REFERENCE) or find_champion(client, name)
    return json.loads(version.tags.get(STATISTICS_TAG, "{}")) if version else {}


def accept_statistics(*, dataset: str, version: int, config: RegisterConfig) -> None:
    """Give a version of the model of `dataset` the alias `reference`; see `reference_statistics`.

    Raises:
        ConfigError: there is no such version, or it was registered without a validation.
        TrackingError: the server does not answer.
    """
    client, name = runs.connect(config), MODEL_PREFIX + dataset
    with runs.explained(config):
        versions = client.search_model_versions(f"name = '{name}'")
        found = next((one for one in versions if int(one.version) == version), None)
        if found is None or STATISTICS_TAG not in found.tags:
            lacks = "no such version" if found is None else "it was registered without the statistics of its data"
            raise ConfigError(f"--version: version {version} of {name}: {lacks}; `seqrec registry show` lists versions")
        client.set_registered_model_alias(name, REFERENCE, found.version)
    logger.info("drift of %s is now measured against the data of version %d", dataset, version)


def fetch_champion(*, dataset: str, folder: Path, config: RegisterConfig) -> str:
    """Write weights, card, vocabulary and users of the champion of `dataset` to `folder`, or a note if there is none.

    The note is there because an object store keeps no empty folder.

    A retraining starts from them. For a refitted champion they are the evaluated weights, which saw no test event.

    Returns:
        The version, or nothing.

    Raises:
        TrackingError: the server does not answer, or has lost the champion's files.
    """
    client, name = runs.connect(config), MODEL_PREFIX + dataset
    folder.mkdir(parents=True, exist_ok=True)
    with runs.explained(config):
        evaluated = find_evaluated(client, name)
    if evaluated is None:
        write_text(folder / "none.txt", f"{name} has no champion yet\n")
        return ""
    fetch(f"models:/{name}/{evaluated.version}", folder, config)
    return str(evaluated.version)


def fetch(uri: str, folder: Path, config: RegisterConfig) -> None:
    """Write weights, card, vocabulary and users, and of a text model its tokens, of `uri` to `folder`.

    Raises:
        TrackingError: the server does not answer, has no such model or has lost its files, or `register` did not log
            the model.
    """
    runs.connect(config, create=False)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model = Path(mlflow.artifacts.download_artifacts(uri, dst_path=directory))
        except (MlflowException, OSError) as error:
            server = redacted(runs.tracking_uri(config))
            if "not found" in str(error):
                known = ", ".join(datasets(config))
                held = f"`seqrec registry show --dataset` lists versions of {known}" if known else "it has no model"
                raise TrackingError(
                    f"{uri} is not in {server}: {held}; `make repro` registers models, `seqrec import --run` those of "
                    "a run, and `seqrec register` those of results that DVC has fetched; a folder such as "
                    "artifacts/sasrec/finetuned can be named as well"
                ) from error
            raise TrackingError(
                f"register.tracking_uri: {uri} cannot be fetched from {server} ({runs.first_line(error)})"
            ) from error
        if not (model / ARTIFACTS / MODEL_CARD).is_file():
            raise TrackingError(f"{uri} holds no {MODEL_CARD}, so it was not logged by `register`")
        for file in (WEIGHTS, MODEL_CARD, TOKENS, COUNTS, GRAPH, GRAPH_CARD, *FILES):
            if (model / ARTIFACTS / file).is_file():
                shutil.copyfile(model / ARTIFACTS / file, folder / file)
