"""Make the pictures of the README from the last run: `python scripts/screenshots.py`.

Needs reports/leaderboard.json and mlflow.db, which `make repro` leaves, and Chromium, which no Python package brings
(Debian: `apt-get install chromium`; elsewhere name the program with --chromium). Nothing is changed: the MLflow page
is that of a copy of the database.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from mlflow import MlflowClient
from rich.console import Console

from seqrec import leaderboard
from seqrec.artifacts import read_json
from seqrec.config import load
from seqrec.tracking import SQLITE, metric_name

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("valid/ndcg@10", "test/ndcg@10", "test/recall@10", "test/mrr", "test/coverage@10")  # columns of the run table
VIEW = "readme"
WIDTH, HEIGHT = 1400, 420
START_SECONDS = 120.0
RENDER_MS = 20_000  # of the page's own clock
LARGEST = 300_000  # bytes of a picture
CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
)


def main() -> None:
    """Write docs/images/leaderboard.svg and docs/images/mlflow.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    parser.add_argument("--chromium", default=found, help="the browser (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    flags = parser.parse_args()
    if not flags.chromium:
        parser.error("no Chromium found: install it, or name it with --chromium")
    flags.output.mkdir(parents=True, exist_ok=True)
    draw_leaderboard(flags.output / "leaderboard.svg")
    draw_runs(flags.output / "mlflow.png", flags.chromium)
    for path in sorted(flags.output.iterdir()):
        if path.stat().st_size > LARGEST:
            sys.exit(f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}")


def draw_leaderboard(path: Path) -> None:
    """Write the leaderboard as it looks in a terminal."""
    rows = read_json(ROOT / "reports" / leaderboard.LEADERBOARD)["rows"]
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True)
        console.print(leaderboard.render(rows))
    path.write_text(console.export_svg(title="make repro"), encoding="utf-8")


def draw_runs(path: Path, chromium: str) -> None:
    """Write MLflow's table of the last pipeline's runs."""
    experiment = load(ROOT / "params.yaml").section("register").experiment
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        with closing(sqlite3.connect(ROOT / "mlflow.db")) as source, closing(sqlite3.connect(database)) as copy:
            source.backup(copy)
        query = share_view(f"{SQLITE}{database}", experiment)
        with server(f"{SQLITE}{database}") as address:
            photograph(f"{address}/#/{query}", path, chromium, Path(folder, "profile"))


def share_view(uri: str, experiment: str) -> str:
    """Store a view of the experiment's newest pipeline run with our columns; return the path that opens it.

    The same tag is written when somebody presses Share in MLflow's page.
    """
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        raise SystemExit(f"no experiment {experiment!r} in mlflow.db: run `make repro` first")
    runs = client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"])
    parents = [run.info.run_id for run in runs if "mlflow.parentRunId" not in run.data.tags]
    view: Mapping[str, object] = {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": ["attributes.`Duration`", *(f"metrics.`{metric_name(name)}`" for name in SHOWN)],
        "runsExpanded": dict.fromkeys(parents, True),
    }
    client.set_experiment_tag(found.experiment_id, f"mlflow.sharedViewState.{VIEW}", json.dumps(view))
    return f"experiments/{found.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={VIEW}"


@contextmanager
def server(uri: str) -> Iterator[str]:
    """Serve MLflow on a free port of this machine alone; give its address."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", process)
            yield address
        finally:
            process.terminate()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Return once `address` answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            direct.open(address, timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise SystemExit("mlflow ui did not start: try `make ui`")


def photograph(address: str, path: Path, chromium: str, profile: Path) -> None:
    """Write what a browser shows at `address` to `path`."""
    subprocess.run(
        [
            chromium,
            *CHROMIUM_FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--virtual-time-budget={RENDER_MS}",
            f"--screenshot={path}",
            address,
        ],
        check=True,
        timeout=180,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
