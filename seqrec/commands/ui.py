"""Opens MLflow at the page that compares the models of the last run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import webbrowser

from rich.console import Console

from seqrec.config import RegisterConfig
from seqrec.tracking import runs, view

SERVER = ("-m", "mlflow", "ui", "--workers", "1")
QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
START_SECONDS = 60.0


def ui(*, config: RegisterConfig, port: int = 5000, no_browser: bool = False) -> None:
    """Print and open the page that compares the models; start MLflow, until interrupted, if no server is running.

    Args:
        config: section `register`.
        port: port of the server on this machine.
        no_browser: only print the address.

    Raises:
        TrackingError: the tracking server does not answer.
    """
    client, uri = runs.connect(config), runs.tracking_uri(config)
    experiment = runs.experiment(client, config)
    remote = uri.startswith(("http://", "https://"))
    address = uri.rstrip("/") if remote else f"http://127.0.0.1:{port}"
    page = view.link(address, experiment)
    Console().print(page, soft_wrap=True, highlight=False, markup=False)
    if not no_browser:
        threading.Thread(target=_open, args=(address, page), daemon=True).start()
    if remote:
        return
    command = [sys.executable, *SERVER, "--backend-store-uri", uri, "--port", str(port)]
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run(command, env={**os.environ, **QUIET}, check=True)


def _open(address: str, page: str) -> None:
    """Open `page` in a browser as soon as the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            webbrowser.open(page)
            return
