"""Runs in MLflow: finding or opening them by fingerprint, and logging so that doing it twice changes nothing.

MLflow is imported when it is first used: training logs live where it is installed, and runs where it is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from seqrec.config import RegisterConfig
from seqrec.errors import RetryableError
from seqrec.locks import locked
from seqrec.redaction import redacted, split_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Metric, Run

    from seqrec.training.progress import LogEpoch, OpenLog

logger = logging.getLogger(__name__)

HIDDEN = "mlflow.seqrec."  # begins a tag that only we read: MLflow's pages show no tag that begins with "mlflow."
FINGERPRINT = f"{HIDDEN}fingerprint"
KIND = "seqrec.kind"  # tag: pipeline run, model or baseline
PARENT = "mlflow.parentRunId"
UNLOGGED = (
    "epoch",
    "step",
    "seconds",
    "loss/task",
    "learning_rate",
    "targets_per_second",
    "valid/recall@10",
    "valid/mrr",
)
PIPELINE_RUN, OUTCOME, FAILURE = "seqrec.pipeline_run", "seqrec.outcome", "seqrec.failure"
CHANGES_TAG = "seqrec.changes"  # settings changed for one run, as JSON
COMPLETE = f"{HIDDEN}complete"  # tag that `register` sets last: what a run holds, or which pipeline run has ended
FAILED_STATES = ("FAILED", "CANCELED")  # of an orchestrator
SQLITE = "sqlite:///"
SMALLEST_PAGE = 512  # bytes of a SQLite file
ENVIRONMENT = {  # defaults, unless the user sets them
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
ADVICE = {  # words of a database's errors -> what to do
    "database is locked": "another process has locked the database; wait until it has ended, and try again",
    "disk is full": "the disk is full; free some space, and try again",
    "disk i/o error": "the disk is full or has failed; check it, and try again",
    "readonly database": "the database is read-only; make the file and its folder writable",
    "unable to open database file": "the database cannot be opened; create its folder and make it writable",
    "file is not a database": "the file is truncated or no SQLite database; name another, or restore a backup",
    "malformed": "the database is damaged; restore it from a backup",
    "failed with error code 401": "the server refuses the user or the password; set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD",
}
Record = Mapping[str, Any]
Dated = tuple[Record, int, float]  # with its step, and the time in seconds since 1970


class TrackingError(RetryableError):
    """A request to the tracking server failed; the message names the setting of its address."""


def tracking_uri(config: RegisterConfig) -> str:
    """Return where runs go; the environment wins. A SQLite file is named by its absolute path.

    Raises:
        TrackingError: the path is none that an address can hold.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or config.tracking_uri
    path = sqlite_path(uri)
    if path and {"%", "?"}.intersection(str(path.parent)):
        raise TrackingError(f"register.tracking_uri: {path.parent} has % or ? in its name, which MLflow cannot read")
    return uri if path is None else f"{SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Return the database file as an absolute path, or None for any other kind of store."""
    if not uri.startswith(SQLITE):
        return None
    return Path(uri.removeprefix(SQLITE)).absolute()


def is_missing(config: RegisterConfig) -> bool:
    """Return whether runs go into a SQLite file that does not exist, which `connect` would create."""
    path = sqlite_path(tracking_uri(config))
    return path is not None and not path.exists()


@cache
def injected_run() -> str | None:
    """Return the run that an orchestrator made for this process, and take it out of the environment.

    MLflow would otherwise log into that run whatever parent or run is asked for (mlflow/mlflow#15713).
    """
    return os.environ.pop("MLFLOW_RUN_ID", None) or None


def connect(config: RegisterConfig, *, create: bool = True) -> MlflowClient:
    """Return a client of a tracking server that answers. A missing SQLite file is created, or refused without `create`.

    Raises:
        TrackingError: it does not, or refuses the address, or its database was moved away from its artifacts.
    """
    if not create and is_missing(config):
        raise TrackingError(
            f"register.tracking_uri: there is no file {sqlite_path(tracking_uri(config))}, which `make repro` and "
            "`seqrec import --run` create: run one of them first, or set MLFLOW_TRACKING_URI or register.tracking_uri"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    injected_run()
    _move_credentials()
    import mlflow
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    mlflow.telemetry.set_telemetry_client()  # off, also where mlflow was imported before the environment was set
    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.WARNING)

    uri = tracking_uri(config)
    try:
        _create_database(uri)
        _set_default(uri)
        client = mlflow.MlflowClient(uri)
        found = client.get_experiment_by_name(config.experiment)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if advice := advice_on(error):
            raise TrackingError(f"register.tracking_uri: {redacted(uri)}: {advice}") from error
        raise TrackingError(
            f"register.tracking_uri: {redacted(uri)} does not answer ({first_line(error)}); start the server, or set "
            "MLFLOW_TRACKING_URI or register.tracking_uri to another one"
        ) from error
    if found is not None:
        _check_place(uri, found.artifact_location)
    return client


def _check_place(uri: str, location: str) -> None:
    """Raise TrackingError if the artifacts of a local database are not stored beside it."""
    path, folder = sqlite_path(uri), Path(location.removeprefix("file://"))
    local = location.startswith("file://") or ":/" not in location
    if path is None or not local or folder.resolve().is_relative_to(path.parent.resolve()):
        return
    raise TrackingError(
        f"register.tracking_uri: {path} keeps its artifacts in {folder}, not beside itself: the project was moved or "
        f"copied. After a move, run `ln -s {path.parent} {folder.parent}`. In a copy, remove {path.name} and "
        "mlartifacts/, then run `seqrec register`, or `seqrec import` for the folder of a run: it creates them again"
    )


@contextlib.contextmanager
def explained(config: RegisterConfig) -> Iterator[None]:
    """Turn errors of MLflow and its database in the block into a TrackingError of one line that says what to do."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        reason = advice_on(error) or f"failed: {first_line(error)}"
        raise TrackingError(redacted(f"register.tracking_uri: {tracking_uri(config)}: {reason}")) from error


def advice_on(error: Exception) -> str:
    """Return what to do about a known failure of the database, recognised by its text; empty for any other."""
    return next((advice for words, advice in ADVICE.items() if words in str(error).lower()), "")


@contextlib.contextmanager
def registering(config: RegisterConfig, dataset: str) -> Iterator[None]:
    """Hold the lock of those that register models of `dataset`: beside a SQLite file, of this user otherwise.

    Raises:
        LockedError: another process registers.
    """
    uri = tracking_uri(config)
    path, name = sqlite_path(uri), re.sub(r"[^\w.-]", "_", dataset)
    if path is None:
        user = os.getuid()  # one user cannot open the file of another
        path = Path(tempfile.gettempdir()) / f"seqrec-{user}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
    with locked(path.with_name(f"{path.name}.{name}.lock"), f"registering models of {dataset} in {redacted(uri)}"):
        yield


def _move_credentials() -> None:
    """Take user and password out of MLFLOW_TRACKING_URI: MLflow prints that address, and not these variables."""
    uri, user, password = split_credentials(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if uri.startswith(("http://", "https://")) and user and password:
        os.environ["MLFLOW_TRACKING_URI"] = uri
        os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = user, password


def _set_default(uri: str) -> None:
    """Tell the parts of MLflow that ask for the process's address; the environment stays as the user set it."""
    import mlflow

    given = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    if given is None:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    else:
        os.environ["MLFLOW_TRACKING_URI"] = given


def first_line(error: Exception) -> str:
    """Return the first line of the message without secrets, truncated to fit into another message."""
    return redacted((str(error).splitlines() or [type(error).__name__])[0])[:300]


def is_cut_short(database: Path) -> bool:
    """Return whether a SQLite file is so short that SQLite would take it for a new one."""
    return database.is_file() and database.stat().st_size < SMALLEST_PAGE


def _create_database(uri: str) -> None:
    """Create a missing SQLite database in one step: MLflow cannot open one that it was killed in making."""
    path = sqlite_path(uri)
    if path is None:
        return
    if path.is_dir():  # MLflow would try again and again
        raise IsADirectoryError("it is a folder, but must be a file")
    if is_cut_short(path):
        raise OSError("file is not a database")
    if path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with FileLock(path.with_name(f"{path.name}.lock")):  # waits for another process that creates it
        if path.exists():
            return
        for left in path.parent.glob(f"{partial.name}*"):  # by a process that was killed
            left.unlink()
        MlflowClient(f"{SQLITE}{partial}").search_experiments(max_results=1)
        if path.exists():  # it was away for some seconds, and is back
            partial.unlink()
        else:
            partial.rename(path)


def experiment(client: MlflowClient, config: RegisterConfig) -> str:
    """Return the id of the experiment to log into, created if it is missing.

    Artifacts go to `mlartifacts/` beside a SQLite database, and wherever it decides with any other server.

    Raises:
        TrackingError: the experiment was deleted.
    """
    from mlflow.exceptions import MlflowException

    if run := injected_run():
        return str(client.get_run(run).info.experiment_id)
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    path = sqlite_path(tracking_uri(config))
    location = None if path is None else str(path.parent / "mlartifacts")
    found = client.get_experiment_by_name(config.experiment)
    if found is None:
        try:
            return str(client.create_experiment(config.experiment, artifact_location=location))
        except MlflowException:
            found = client.get_experiment_by_name(config.experiment)  # another process may have created it meanwhile
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"register.experiment: {config.experiment!r} was deleted; choose another name, or restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def find_run(client: MlflowClient, experiment_id: str, fingerprint: str) -> Run | None:
    """Return the run of this training, evaluation or pipeline, if there is one."""
    runs = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`{FINGERPRINT}` = '{fingerprint}'",
        order_by=["attributes.start_time ASC"],
        max_results=1,
    )
    return runs[0] if runs else None


def open_run(
    client: MlflowClient,
    experiment_id: str,
    fingerprint: str,
    name: str,
    *,
    parent: str | None = None,
    seconds: float = 0,
) -> Run:
    """Return the run with this fingerprint, as a child of `parent`; a new one began `seconds` ago."""
    run = find_run(client, experiment_id, fingerprint)
    if run is None:
        tags = {FINGERPRINT: fingerprint} | ({PARENT: parent} if parent else {})
        start = int(1000 * (time.time() - seconds))
        return client.create_run(experiment_id, start_time=start, tags=tags, run_name=name)
    if parent and run.data.tags.get(PARENT) != parent:
        client.set_tag(run.info.run_id, PARENT, parent)
    return run


def record_outcome(
    *, pipeline: str, pipeline_run: str, state: str, failure: str | None, config: RegisterConfig
) -> None:
    """Write how a run of an orchestrator ended: into the MLflow run that `register` made for it, or a new one.

    A run has succeeded if `register` has left its mark, which is the last thing that it writes. The state from Kubeflow
    is not certain (`COMPLETE`, `CACHED` or `RUNNING` after a success, and never an error): it decides only for a
    pipeline without `register`.

    Raises:
        TrackingError: the server does not answer.
    """
    client = connect(config)
    from mlflow.entities import RunTag

    experiment_id, given = experiment(client, config), injected_run()
    if given is None:
        text = f"tags.`{PIPELINE_RUN}` = '{pipeline_run}'"
        found = client.search_runs([experiment_id], filter_string=text, max_results=1)
        run = found[0] if found else open_run(client, experiment_id, pipeline_run, f"{pipeline}-{pipeline_run[:8]}")
    else:
        run = client.get_run(given)
    marked = run.data.tags.get(COMPLETE) == pipeline_run
    succeeded = state not in FAILED_STATES if pipeline == "pretraining" else marked
    reason = failure or ("" if succeeded else "the orchestrator gives no reason; its page shows the failed step")
    tags = {PIPELINE_RUN: pipeline_run, OUTCOME: "SUCCEEDED" if succeeded else "FAILED", FAILURE: reason}
    client.log_batch(run.info.run_id, tags=[RunTag(key, redacted(value)[:5000]) for key, value in tags.items()])
    if given is None:  # whoever made the run ends it
        client.set_terminated(run.info.run_id, status="FINISHED" if succeeded else "FAILED")


def metric_name(name: str) -> str:
    """Return `name` as MLflow allows it: `test/ndcg@10/length=short` -> `test/ndcg_at_10/length.short`."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_").replace("=", "."))


def rounded(value: float) -> float:
    """Return a figure with four digits after the point, or four digits that count where it is less than 1."""
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as MLflow parameters: `{"a": {"b": 1}}` -> `{"a.b": "1"}`."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[re.sub(r"[^\w.\- /]", "_", f"{prefix}{key}")] = redacted(str(value))
    return flat


def log_params(
    client: MlflowClient, run: Run, content: Mapping[str, Any], tags: Mapping[str, str] | None = None
) -> None:
    """Log tags, and those of the flattened settings that the run does not hold yet: MLflow never changes one."""
    from mlflow.entities import Param, RunTag

    params = [Param(key, value) for key, value in flatten(content).items() if key not in run.data.params]
    client.log_batch(run.info.run_id, params=params, tags=[RunTag(key, value) for key, value in (tags or {}).items()])


def log_metrics(
    client: MlflowClient,
    run: Run,
    metrics: Mapping[str, float],
    history: Sequence[Record] = (),
    *,
    model_id: str | None = None,
    dataset: Dataset | None = None,
) -> None:
    """Log final values and the curves of a finished training; with `model_id` the values also rank the logged model.

    A value is dated from the run's start, so that the store drops it as a duplicate when it is logged again; one
    that replaces another value is dated now, which makes it the latest. A curve has a point per epoch (1, 2, ... over
    all phases). The values come first: pages that compare runs open on the first metric. All are `rounded`:
    metrics.json, among the artifacts, has every digit.
    """
    from mlflow.entities import Metric

    start, now = run.info.start_time, int(1000 * time.time())
    used = {} if dataset is None else {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    points = []
    for name, value in metrics.items():
        key = metric_name(name)
        value = rounded(float(value))
        replaces = run.data.metrics.get(key, value) != value
        points.append(Metric(key, value, now if replaces else start, 0, model_id=model_id, **used))
    ends = itertools.accumulate(record["seconds"] for record in history)
    epochs = zip(history, itertools.count(1), (start / 1000 + end for end in ends), strict=False)
    client.log_batch(run.info.run_id, metrics=points + curves(client, run, epochs))


def curves(client: MlflowClient, run: Run, records: Iterable[Dated]) -> list[Metric]:
    """Return the numbers of the records as metrics `curve/...`, without the points that the run already holds.

    The prefix keeps them apart from the final values, which come from the best epoch, not from the last. Only
    history.jsonl keeps those of `UNLOGGED`.
    """
    from mlflow.entities import Metric

    points = [
        Metric(f"curve/{metric_name(key)}", rounded(float(value)), int(1000 * seconds), step)
        for record, step, seconds in records
        for key, value in record.items()
        if key not in UNLOGGED
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    begun = {point.key for point in points} & run.data.metrics.keys()
    held = {(key, p.step, p.value) for key in begun for p in client.get_metric_history(run.info.run_id, key)}
    return [point for point in points if (point.key, point.step, point.value) not in held]


def epoch_log(experiment: str, log: LogEpoch | None = None) -> OpenLog:
    """Return what opens the log of a training: `log` if given, else MLflow if MLFLOW_TRACKING_URI is set.

    Without either, the stage `register` logs the epochs.
    """
    if log is not None or "MLFLOW_TRACKING_URI" not in os.environ:
        return lambda *_: contextlib.nullcontext(log)
    config = RegisterConfig(experiment=experiment)
    return lambda fingerprint, title: live_run(fingerprint, title, config)


@contextlib.contextmanager
def live_run(fingerprint: str, name: str, config: RegisterConfig) -> Iterator[Callable[[Record, int], None]]:
    """Yield `log(record, epoch)`, which logs a record of numbers to MLflow; `epoch` counts over all phases.

    Training never depends on this: the first failure costs one warning and at most the time that MLflow waits for an
    answer, nothing is logged after it, and `register` imports what is missing. Only rank 0 logs.
    """
    on = int(os.environ.get("RANK", "0")) == 0

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        nonlocal on
        try:
            yield
        except Exception as error:  # whatever goes wrong here must not stop the training
            on = False
            logger.warning("live logging to MLflow is off (%s); `register` will import this run", first_line(error))

    def log(record: Record, epoch: int) -> None:
        if on:
            with attempt():
                client.log_batch(run.info.run_id, metrics=curves(client, run, [(record, epoch, time.time())]))

    if on:
        with attempt():
            client = connect(config)
            run = open_run(client, experiment(client, config), fingerprint, name, parent=injected_run())
            client.update_run(run.info.run_id, status="RUNNING")
    status = "FAILED"
    try:
        yield log
        status = "FINISHED"
    finally:
        if on:
            with attempt():
                client.set_terminated(run.info.run_id, status=status)
