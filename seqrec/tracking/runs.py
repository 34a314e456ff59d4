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
import queue
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqrec.config import RegisterConfig
from seqrec.locks import locked
from seqrec.redaction import redacted, split_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Run

logger = logging.getLogger(__name__)

FINGERPRINT = "seqrec.fingerprint"
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
SQLITE = "sqlite:///"
SMALLEST_PAGE = 512  # bytes of a SQLite file
ENVIRONMENT = {  # defaults, unless the user sets them
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
CLOSE_SECONDS = 2.0  # maximum time that a live run delays a finished training
ADVICE = {  # words of a database's errors -> what to do
    "database is locked": "the database is locked by another process; wait until that has ended, and try again",
    "disk is full": "the disk is full; free some space, and try again",
    "disk i/o error": "the disk failed, or is full; look at it, and try again",
    "readonly database": "the database may not be written to; make the file and its folder writable",
    "unable to open database file": "the database cannot be opened; make its folder exist and writable",
    "file is not a database": "the file is no SQLite database, or cut short; name another, or restore it from a backup",
    "malformed": "the database is damaged; restore it from a backup",
    "failed with error code 401": "the server wants another user or password; set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD",
}
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100  # MLflow's limits
Record = Mapping[str, Any]
Dated = tuple[Record, int, float]  # with its step, and the time in seconds since 1970


class TrackingError(ValueError):
    """A request to the tracking server failed; the message names the setting of its address."""


def tracking_uri(config: RegisterConfig) -> str:
    """Return where runs go; the environment wins. A SQLite file is named by its absolute path."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or config.tracking_uri
    path = sqlite_path(uri)
    return uri if path is None else f"{SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Return the database file as an absolute path, or None for any other kind of store."""
    if not uri.startswith(SQLITE):
        return None
    return Path(uri.removeprefix(SQLITE)).absolute()


@cache
def injected_run() -> str | None:
    """Return the run that an orchestrator made for this process, and take it out of the environment.

    MLflow would otherwise log into that run whatever parent or run is asked for (mlflow/mlflow#15713).
    """
    return os.environ.pop("MLFLOW_RUN_ID", None) or None


def connect(config: RegisterConfig) -> MlflowClient:
    """Return a client of a tracking server that answers.

    Raises:
        TrackingError: it does not, or refuses the address, or its database was moved away from its artifacts.
    """
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
    """Raise TrackingError where the artifacts of a local database lie elsewhere than beside it."""
    path, folder = sqlite_path(uri), local_path(location)
    if path is None or folder is None or folder.resolve().is_relative_to(path.parent.resolve()):
        return
    raise TrackingError(
        f"register.tracking_uri: {path} keeps its artifacts in {folder}, not beside itself: the project was moved or "
        "copied. `python -m seqrec registry relocate` makes a backup and corrects the paths"
    )


def local_path(location: str) -> Path | None:
    """Return the folder that an artifact location of MLflow names, or None where it is no local one."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return None if "://" in location or ":/" in location else Path(location)


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
    """Hold the lock of those that register models of `dataset`: beside a SQLite file, on this machine otherwise.

    Raises:
        LockedError: another process registers.
    """
    uri = tracking_uri(config)
    path, name = sqlite_path(uri), re.sub(r"[^\w.-]", "_", dataset)
    if path is None:
        path = Path(tempfile.gettempdir()) / f"seqrec-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
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
    _remove_left_behind(path)
    if is_cut_short(path):
        raise OSError("file is not a database")
    if path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{path.name}.{os.getpid()}.{uuid.uuid4().hex}.partial"  # a live log may make it at the same time
    partial = path.with_name(name)
    MlflowClient(f"{SQLITE}{partial}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):  # another process was faster; use its database
        path.hardlink_to(partial)
    partial.unlink(missing_ok=True)


def _remove_left_behind(path: Path) -> None:
    """Remove the beginnings of the database at `path` whose process was killed."""
    for partial in path.parent.glob(f"{path.name}.*.*.partial*"):
        pid = partial.name.removeprefix(f"{path.name}.").partition(".")[0]
        if pid.isdigit() and not _is_running(int(pid)):
            partial.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # belongs to another process
        pass
    return True


def experiment(client: MlflowClient, config: RegisterConfig) -> str:
    """Return the id of the experiment to log into, created if it is missing.

    Artifacts go to `mlartifacts/` beside a SQLite database, and wherever it decides with any other server.

    Raises:
        TrackingError: the experiment was deleted.
    """
    if run := injected_run():
        return str(client.get_run(run).info.experiment_id)
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    path = sqlite_path(tracking_uri(config))
    location = None if path is None else str(path.parent / "mlartifacts")
    found = client.get_experiment_by_name(config.experiment)
    if found is None:
        return str(client.create_experiment(config.experiment, artifact_location=location))
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"register.experiment: {config.experiment!r} was deleted; choose another name, or restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def find_run(client: MlflowClient, experiment_id: str, fingerprint: str) -> Run | None:
    """Return the run of this training, evaluation or pipeline, if it was ever begun."""
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


def record_outcome(*, pipeline_run: str, name: str, state: str, failure: str | None, config: RegisterConfig) -> None:
    """Write how a run of an orchestrator ended: into the MLflow run that `register` made for it, or a new one.

    Args:
        pipeline_run: the orchestrator's id of its run.
        name: of a new run.
        state: SUCCEEDED, or any other state.
        failure: what went wrong, if anything.
        config: section `register`.

    Raises:
        TrackingError: the server does not answer.
    """
    client = connect(config)
    experiment_id, run_id = experiment(client, config), injected_run()
    given = run_id is not None
    if run_id is None:
        text = f"tags.`{PIPELINE_RUN}` = '{pipeline_run}'"
        found = client.search_runs([experiment_id], filter_string=text, max_results=1)
        run_id = (found[0] if found else open_run(client, experiment_id, pipeline_run, name)).info.run_id
    for key, value in ((PIPELINE_RUN, pipeline_run), (OUTCOME, state), (FAILURE, failure or "")):
        client.set_tag(run_id, key, redacted(value)[:5000])
    if not given:  # whoever made the run ends it
        client.set_terminated(run_id, status="FINISHED" if state == "SUCCEEDED" else "FAILED")


def metric_name(name: str) -> str:
    """Return `name` as MLflow allows it: `test/ndcg@10/length=short` -> `test/ndcg_at_10/length.short`."""
    return re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_").replace("=", "."))


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as MLflow parameters: `{"a": {"b": 1}}` -> `{"a.b": "1"}`."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[re.sub(r"[^\w.\- /]", "_", f"{prefix}{key}")] = redacted(str(value))
    return flat


def log_params(client: MlflowClient, run: Run, content: Mapping[str, Any]) -> None:
    """Log those of the flattened settings that the run does not hold yet: MLflow never changes one."""
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in flatten(content).items() if key not in run.data.params]
    for start in range(0, len(params), PARAMS_PER_BATCH):
        client.log_batch(run.info.run_id, params=params[start : start + PARAMS_PER_BATCH])


def log_metrics(
    client: MlflowClient,
    run: Run,
    metrics: Mapping[str, float],
    model_id: str | None = None,
    dataset: Dataset | None = None,
) -> None:
    """Log final values; with `model_id` they also rank the logged model, on `dataset`.

    A value is dated from the run's start, so that the store drops it as a duplicate when it is logged again; one
    that replaces another value is dated now, which makes it the latest.
    """
    from mlflow.entities import Metric

    start, now = run.info.start_time, int(1000 * time.time())
    used = {} if dataset is None else {"dataset_name": dataset.name, "dataset_digest": dataset.digest}
    points = []
    for name, value in metrics.items():
        key = metric_name(name)
        replaces = run.data.metrics.get(key, value) != value
        points.append(Metric(key, float(value), now if replaces else start, 0, model_id=model_id, **used))
    _log_points(client, run.info.run_id, points)


def _log_points(client: MlflowClient, run_id: str, points: Sequence[Any]) -> None:
    for start in range(0, len(points), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=points[start : start + METRICS_PER_BATCH])


class Curves:
    """Writes the records of `history.jsonl` into a run as metrics `curve/...`, each point once.

    The prefix keeps them apart from the final values, which come from the best epoch, not from the last.
    """

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client = client
        self.run = run
        self.known: dict[str, set[tuple[int, float]]] = {}  # by metric: step, value

    def write(self, records: Iterable[Dated]) -> None:
        """Log the numbers of the records, except those of `UNLOGGED`, which only history.jsonl keeps."""
        from mlflow.entities import Metric

        points = []
        for record, step, seconds in records:
            for key, value in record.items():
                name = f"curve/{metric_name(key)}"
                if key not in UNLOGGED and _is_number(value) and (step, value) not in self._logged(name):
                    self.known[name].add((step, value))
                    points.append(Metric(name, float(value), int(1000 * seconds), step))
        _log_points(self.client, self.run.info.run_id, points)

    def _logged(self, name: str) -> set[tuple[int, float]]:
        if name not in self.known:
            begun = name in self.run.data.metrics
            history = self.client.get_metric_history(self.run.info.run_id, name) if begun else ()
            self.known[name] = {(point.step, point.value) for point in history}
        return self.known[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def log_history(client: MlflowClient, run: Run, history: Sequence[Record]) -> None:
    """Log the curves of a finished training by epoch (1, 2, ... over all phases), dated from the run's start."""
    ends = itertools.accumulate(record["seconds"] for record in history)
    start = run.info.start_time / 1000
    Curves(client, run).write(
        (record, epoch, start + end) for epoch, (record, end) in enumerate(zip(history, ends, strict=True), 1)
    )


@contextmanager
def live_run(fingerprint: str, name: str, config: RegisterConfig) -> Iterator[Callable[[Record, int], None]]:
    """Yield `log(record, step)`, which sends a record of numbers to MLflow in the background.

    `step` is the number of the epoch over all phases. Training never depends on this: `log` only queues, nothing
    here raises, and a server that is dead or slow costs `CLOSE_SECONDS` at the end and one warning; `register`
    imports what is missing. Only rank 0 logs.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        yield lambda record, step: None
        return
    writer = _LiveWriter(fingerprint, name, config)
    status = "FAILED"
    try:
        yield writer.log
        status = "FINISHED"
    finally:
        writer.close(status)


class _LiveWriter:
    """A thread that sends everything to the server; records queued during one request go into the next."""

    def __init__(self, fingerprint: str, name: str, config: RegisterConfig) -> None:
        self.records: queue.SimpleQueue[Dated | str] = queue.SimpleQueue()  # a text ends the run
        self.abandoned = threading.Event()
        with contextlib.suppress(ImportError):  # the thread logs the failure
            import mlflow  # noqa: F401  # here: its import hooks can deadlock with another thread's imports
        self.thread = threading.Thread(target=self._work, args=(fingerprint, name, config), daemon=True)
        self.thread.start()

    def log(self, record: Record, step: int) -> None:
        if self.thread.is_alive():
            self.records.put((dict(record), step, time.time()))

    def close(self, status: str) -> None:
        if not self.thread.is_alive():
            return
        self.records.put(status)
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            self.abandoned.set()
            _warn_off(f"no answer within {CLOSE_SECONDS:g} s of the end of training")

    def _work(self, fingerprint: str, name: str, config: RegisterConfig) -> None:
        try:
            client = connect(config)
            run = open_run(client, experiment(client, config), fingerprint, name, parent=injected_run())
            client.update_run(run.info.run_id, status="RUNNING")
            curves = Curves(client, run)
            while True:
                batch, status = self._next_batch()
                if self.abandoned.is_set():
                    return
                curves.write(batch)
                if status:
                    client.set_terminated(run.info.run_id, status=status)
                    return
        except Exception as error:  # whatever goes wrong here must not stop the training
            if not self.abandoned.is_set():
                _warn_off(first_line(error))

    def _next_batch(self) -> tuple[list[Dated], str | None]:
        """Return all that has queued up, at least one record or the status that ends the run."""
        batch: list[Dated] = []
        item = self.records.get()
        while not isinstance(item, str):
            batch.append(item)
            try:
                item = self.records.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item


def _warn_off(reason: str) -> None:
    logger.warning("live logging to MLflow is off (%s); `register` will import this run", reason)
