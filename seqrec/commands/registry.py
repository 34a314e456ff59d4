"""The registry on the command line: show versions, promote one, or roll back."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.artifacts import MODEL_PREFIX
from seqrec.commands.events import show_clicks
from seqrec.config import ConfigError, RegisterConfig
from seqrec.config.ranges import Count
from seqrec.evaluation.metrics import SELECTION
from seqrec.serving.events import Store, StoreError, missing, store_url
from seqrec.tracking import registry as models
from seqrec.tracking.runs import TrackingError, connect, explained, first_line, metric_name, registering

logger = logging.getLogger(__name__)


def registry(
    action: Literal["show", "promote", "rollback"],
    *,
    dataset: str,
    config: RegisterConfig,
    version: Count = 0,
    reason: str = "",
    store: str = "",
) -> None:
    """Show the versions of a dataset's model, or change its champion.

    Args:
        action: show, promote (make --version the champion) or rollback (return to the previous champion, skipping
            those that were themselves rolled back).
        dataset: key in `datasets`; its model is seqrec-DATASET.
        config: section `register`.
        version: version to promote.
        reason: reason for the audit trail.
        store: event store of the service; `promote` then shows the click-through of both versions; default:
            SEQREC_STORE.

    Raises:
        ConfigError: the version or model does not exist, there is no earlier champion, or --version has no effect.
        TrackingError: the server does not answer, or another promotion is under way.
    """
    if action == "promote" and not version:
        raise ConfigError("--version: name the version to promote; `seqrec registry show` lists them")
    if action != "promote" and version:
        raise ConfigError(f"--version has no effect with {action}, only with promote")
    with explained(config):
        _act(action, connect(config, create=False), MODEL_PREFIX + dataset, config, version, reason, store_url(store))


def _act(
    action: str, client: MlflowClient, name: str, config: RegisterConfig, version: int, reason: str, store: str
) -> None:
    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        known = ", ".join(models.datasets(config))
        known = f" (models are registered of {known}, see --dataset)" if known else ""
        raise ConfigError(
            f"{name} is not registered{known}: run `make repro` first, or `seqrec import --run OUT` after another run"
        ) from error
    if action == "show":
        _show(client, model)
        return
    with registering(config, name.removeprefix(MODEL_PREFIX)):
        champion = models.find_champion(client, name)
        chosen = _version(client, name, str(version)) if action == "promote" else _before(client, name, champion)
        if models.is_same(chosen, champion):
            logger.info("version %s of %s is already the champion: nothing to do", chosen.version, name)
            return
        reasons = [reason] if reason else []
        if action == "promote" and store and champion is not None:
            reasons += _click_through(store, str(champion.version), str(chosen.version))
        why = f"{action} by hand{': ' if reasons else ''}{'; '.join(reasons)}"
        still_ours = models.claim(client, name)
        if not (models.is_same(models.find_champion(client, name), champion) and still_ours()):
            raise TrackingError(
                f"{action}: another process is changing the champion of {name}; check the champion and try again"
            )
        models.crown(client, chosen, champion, why, back=action == "rollback")
    logger.info("version %s of %s is the champion", chosen.version, name)


def _click_through(url: str, champion: str, candidate: str) -> list[str]:
    """Print the click-through of both versions; return it in words, or nothing if the store has no data."""
    try:
        if file := missing(url):
            raise StoreError(f"there is no file {file}")
        found = show_clicks(Store(url), champion, candidate)
    except StoreError as error:
        logger.warning(
            "--store: the event store does not answer, so the click-through is unknown (%s)", first_line(error)
        )
        return []
    known = found.champion.answers and found.candidate.answers
    return [f"click-through {found.candidate.rate:.4f} against {found.champion.rate:.4f}, {found}"] if known else []


def _version(client: MlflowClient, name: str, number: str) -> ModelVersion:
    try:
        return client.get_model_version(name, number)
    except MlflowException as error:
        raise ConfigError(f"--version: {name} has no version {number}; `seqrec registry show` lists them") from error


def _before(client: MlflowClient, name: str, champion: ModelVersion | None) -> ModelVersion:
    """Return the last champion before this one that was not rolled back itself."""
    model = client.get_registered_model(name)
    for number in models.champion_history(model):
        try:
            version = client.get_model_version(name, number)
        except MlflowException as error:
            if number in models.rolled_back(model):
                continue
            raise ConfigError(f"rollback: version {number} was deleted; promote another version instead") from error
        if models.WITHDRAWN_TAG not in version.tags and not models.is_same(version, champion):
            return version
    raise ConfigError("rollback: there was no champion before this one; promote a version instead")


def _show(client: MlflowClient, model: RegisteredModel) -> None:
    console = Console()
    table = Table("version", "model", SELECTION, "alias", "gate", title=model.name)
    versions = client.search_model_versions(f"name = '{model.name}'")
    names: dict[str, list[str]] = {}
    for alias, number in sorted(model.aliases.items()):  # numbers or texts, as the store has it
        names.setdefault(str(number), []).append(alias)
    for version in sorted(versions, key=lambda version: int(version.version)):
        tags = version.tags
        value = tags.get(f"seqrec.{metric_name(SELECTION)}")
        shown = "" if value is None else f"{float(value):.4f}"
        row = (str(version.version), tags.get("seqrec.model", ""), shown)
        aliases = ", ".join(names.get(str(version.version), ()))
        table.add_row(*row, aliases, escape(tags.get(models.REASON_TAG, "")))
    console.print(table)
    for key, text in sorted(model.tags.items()):
        if key.startswith(models.AUDIT_TAG):
            moment = datetime.strptime(key.removeprefix(models.AUDIT_TAG), models.AUDIT_TIME)
            console.print(f"{moment:%Y-%m-%d %H:%M:%S} UTC  {escape(text)}", highlight=False)
