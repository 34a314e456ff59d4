"""Make the pictures of the README from the last run: `python scripts/screenshots.py`.

Needs reports/leaderboard.json and mlflow.db, which `make repro` leaves, and for the page of MLflow a browser and what
drives it, which the project does not install: Chromium with chromedriver (Debian: `apt-get install chromium
chromium-driver`) and `pip install selenium`. Nothing is changed: MLflow serves a copy of the database.
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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mlflow import MlflowClient
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import WebDriverWait

from seqrec import leaderboard
from seqrec.artifacts import read_json
from seqrec.config import load
from seqrec.tracking import PARENT, SQLITE, metric_name

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("valid/ndcg@10", "test/ndcg@10", "test/recall@10", "test/coverage@10")  # columns of the run table
VIEW = "readme"
COLUMN = 140  # pixels
WIDTH, HEIGHT = 1340, 640  # of the window, some of which the browser takes; 32 more for each model more
START_SECONDS = 120.0
PAGE_SECONDS = 60.0
SETTLE_SECONDS = 2.0  # the table moves when the hints go
HINTS = ("Hide banner", "Close")  # labels of the buttons that close them
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
    """Keep the runs of the experiment's newest pipeline run alone, and return the path that shows them.

    The tag is the one that MLflow's page writes when somebody shares a view.
    """
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"]) if found else []
    if not runs:
        sys.exit(f"no runs of the experiment {experiment!r} in mlflow.db: run `make repro` first")
    parent = next(run.info.run_id for run in runs if PARENT not in run.data.tags)
    for run in runs:
        if parent not in (run.info.run_id, run.data.tags.get(PARENT)):
            client.delete_run(run.info.run_id)
    columns = [f"metrics.`{metric_name(name)}`" for name in SHOWN]
    view = {
        "orderByKey": columns[0],
        "orderByAsc": False,
        "selectedColumns": ["attributes.`Duration`", *columns],
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, COLUMN),
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
    """Write what a browser shows at `address` to `path`, once the runs are there and the hints are closed."""
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(address)
        wait = WebDriverWait(browser, PAGE_SECONDS)
        for label in HINTS:
            button = (By.CSS_SELECTOR, f"button[aria-label='{label}']")
            wait.until(expected_conditions.element_to_be_clickable(button)).click()
        for name in leaderboard.BASELINES:
            wait.until(expected_conditions.visibility_of_element_located((By.LINK_TEXT, name)))
        time.sleep(SETTLE_SECONDS)
        browser.save_screenshot(str(path))


if __name__ == "__main__":
    main()
