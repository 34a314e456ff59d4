"""Opens MLflow at the page that compares the models of the last run."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser

from mlflow.entities import Experiment
from rich.console import Console

from seqrec.config import ConfigError, RegisterConfig
from seqrec.config.ranges import Port
from seqrec.tracking import runs, view

logger = logging.getLogger(__name__)
SERVER = ("-m", "mlflow", "ui", "--workers", "1")
QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
STDERR = 2  # MLflow's log goes there: stdout has the page alone
START_SECONDS = 180.0
PORTS = 20  # ports that are tried, from the one that was asked for
LAST_PORT = 65_535


def ui(*, config: RegisterConfig, port: Port = 5000, no_browser: bool = False) -> None:
    """Print and open the page that compares the models; start MLflow, until interrupted, if no server is running.

    Args:
        config: section `register`.
        port: first port to try; if another program uses it, the next free one is taken.
        no_browser: only print the address.

    Raises:
        ConfigError: all ports that were tried belong to other programs.
        TrackingError: the tracking server does not answer.
        ValueError: MLflow did not start.
    """
    client, uri = runs.connect(config), runs.tracking_uri(config)
    experiment = client.get_experiment(runs.experiment(client, config))
    if uri.startswith(("http://", "https://")):
        _show(uri.rstrip("/"), experiment, no_browser)
        return
    chosen, running = find_port(port, experiment)
    address = f"http://127.0.0.1:{chosen}"
    if running:
        _show(address, experiment, no_browser)
        return
    if chosen != port:
        logger.info("another program uses port %d: MLflow starts on port %d", port, chosen)
    command = [sys.executable, *SERVER, "--port", str(chosen)]
    environment = {**os.environ, **QUIET, "MLFLOW_BACKEND_STORE_URI": uri}  # which may hold a password
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # MLflow ends with this process
    with (
        contextlib.suppress(KeyboardInterrupt),
        subprocess.Popen(command, env=environment, stdout=STDERR) as server,
    ):
        try:
            _wait(server, address, experiment)
            _show(address, experiment, no_browser)
            if server.wait():
                raise ValueError(f"MLflow ended with status {server.returncode}, see above")
        finally:
            server.terminate()
            signal.signal(signal.SIGTERM, before)


def find_port(first: int, experiment: Experiment) -> tuple[int, bool]:
    """Return the first port at which this project's server answers or could be started, and whether it answers.

    Raises:
        ConfigError: other programs have all ports that were tried.
    """
    ports = range(first, min(first + PORTS, LAST_PORT + 1))
    for port in ports:
        if serves(f"http://127.0.0.1:{port}", experiment):
            return port, True
        if _is_free(port):
            return port, False
    raise ConfigError(f"other programs use the ports {first} to {ports[-1]}: name another port with --port")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def serves(address: str, experiment: Experiment) -> bool:
    """Return whether MLflow answers at `address`, and from the store that holds this very experiment."""
    url = f"{address}/api/2.0/mlflow/experiments/get?experiment_id={experiment.experiment_id}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)["experiment"]
            place = found["name"], found["artifact_location"], int(found["creation_time"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):  # no server, or another kind of one
        return False
    return bool(place == (experiment.name, experiment.artifact_location, experiment.creation_time))


def _wait(server: subprocess.Popen[bytes], address: str, experiment: Experiment) -> None:
    """Return as soon as the server answers; raise ValueError if it ends before, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not serves(address, experiment):
        if server.poll() is not None:
            raise ValueError(f"MLflow did not start at {address}: see above, or name another port with --port")
        if time.monotonic() > deadline:
            raise ValueError(f"MLflow did not answer at {address} within {START_SECONDS:g} s")
        time.sleep(0.5)


def _show(address: str, experiment: Experiment, no_browser: bool) -> None:
    page = view.link(address, experiment.experiment_id)
    Console().print(page, soft_wrap=True, highlight=False, markup=False)
    if not no_browser:
        webbrowser.open(page)
