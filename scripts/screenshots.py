"""Make the pictures of README and docs from the last run: `python scripts/screenshots.py`.

Needs params.yaml, reports/ and mlflow.db, which `make repro` leaves, and a browser and what drives it, which the
project does not install: Chromium with chromedriver (Debian: `apt-get install chromium chromium-driver`) and `pip
install selenium vl-convert-python`. The pages are those that `make ui` and `make repro` name, as they are: MLflow
serves the run's own database. scripts/terminal.py draws `make repro` itself. `--only service` needs no run: the page
of `seqrec serve` shows films of demo_service.py, since the titles of a dataset are not ours to publish.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import demo_service
import vl_convert
from mlflow import MlflowClient
from PIL import Image
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import WebDriverWait

from seqrec.artifacts import REPORT_PAGE, read_json
from seqrec.config import load
from seqrec.evaluation import leaderboard
from seqrec.tracking import view
from seqrec.tracking.runs import PARENT, SQLITE

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 1400  # pixels of the window
PHONE = 390
SCHEMES = ("light", "dark")
HEIGHTS = {"mlflow": 760, "compare": 1000, "model": 760, "report": 1500, "service": 680}  # of each picture
START_SECONDS = 120.0
PAGE_SECONDS = 120.0
SETTLE_SECONDS = 3.0  # pages move when the hints go, and figures are drawn
LARGEST = 300_000  # bytes of a picture
COLOURS = 64  # of a picture of the service: flat colours and grey edges of letters
WATCHED = ("f6", "f7", "f36", "f37")  # films of the history that the service's page shows
CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
)


def main() -> None:
    """Write leaderboard.svg, the figures of `dvc plots show`, and a picture of each page in `HEIGHTS`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    parser.add_argument("--chromium", default=found, help="the browser (default: %(default)s)")
    parser.add_argument("--run", type=Path, default=ROOT, help="folder of the run to show (default: the project)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    parser.add_argument("--only", choices=("run", "service"), help="pictures of the run, or of the service's page")
    flags = parser.parse_args()
    if not flags.chromium:
        parser.error("no Chromium found: install it, or name it with --chromium")
    flags.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(flags.chromium, Path(folder, "profile")) as driver:
        if flags.only != "service":
            draw_leaderboard(flags.run, flags.output / "leaderboard.svg")
            draw_plots(flags.run, flags.output)
            draw_report(driver, flags.run / "reports" / REPORT_PAGE, flags.output)
            draw_mlflow(driver, flags.run, flags.output)
        if flags.only != "run":
            draw_service(driver, Path(folder), flags.output)
    for path in sorted(flags.output.iterdir()):
        if path.stat().st_size > LARGEST:
            sys.exit(f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}")


def draw_leaderboard(run: Path, path: Path) -> None:
    """Write the leaderboard as it looks in a terminal."""
    rows = read_json(run / "reports" / leaderboard.LEADERBOARD)["rows"]
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True)
        console.print(leaderboard.render(rows))
    path.write_text(console.export_svg(title="make repro"), encoding="utf-8")


def draw_plots(run: Path, output: Path) -> None:
    """Write the figures of `dvc plots show`, whose own page fetches what draws them from the network."""
    command = [sys.executable, "-m", "dvc", "plots", "show", "--json"]
    figures = json.loads(subprocess.run(command, cwd=run, capture_output=True, check=True).stdout)["data"]
    for file, (figure,) in figures.items():
        (output / f"plots-{Path(file).stem}.png").write_bytes(vl_convert.vegalite_to_png(figure["content"], scale=1.5))


def draw_report(driver: WebDriver, page: Path, output: Path) -> None:
    """Write the report's beginning, wide and on a phone; its examples are the dataset's, not ours to publish."""
    drawn = "return !document.querySelector('details[open] .figure:not(.js-plotly-plot)')"
    for width, end in ((WIDTH, ""), (PHONE, "-phone")):
        for scheme in SCHEMES:
            show_as(driver, width, HEIGHTS["report"], scheme)
            driver.get(page.resolve().as_uri())
            WebDriverWait(driver, PAGE_SECONDS).until(lambda _: driver.execute_script(drawn))
            save(driver, output / f"report{end}{'-dark' if scheme == 'dark' else ''}.png")


def draw_mlflow(driver: WebDriver, run: Path, output: Path) -> None:
    """Write MLflow's pages of the last pipeline: all runs, the models compared, the registered model."""
    experiment = load(run / "params.yaml").section("register").experiment
    outcome = read_json(run / "reports" / leaderboard.LEADERBOARD)["registry"]
    runs, place = models(f"{SQLITE}{run.resolve() / 'mlflow.db'}", experiment)
    with server(f"{SQLITE}{run.resolve() / 'mlflow.db'}") as address:
        pages = {
            "mlflow": (view.link(address, place), leaderboard.BASELINES[:2]),
            "compare": (view.compare_link(address, place, list(runs.values())), tuple(runs)),
            "model": (
                f"{address}/#/models/{outcome['registered_model']}/versions/{outcome['version']}",
                (f"Version {outcome['version']}",),
            ),
        }
        for name, (page, texts) in pages.items():
            show_as(driver, WIDTH, HEIGHTS[name], "light")
            driver.get(page)
            for text in texts:
                wait = WebDriverWait(driver, PAGE_SECONDS)
                wait.until(expected_conditions.text_to_be_present_in_element((By.TAG_NAME, "body"), text))
            save(driver, output / f"{name}.png")


def draw_service(driver: WebDriver, folder: Path, output: Path) -> None:
    """Write the page of a service with two versions, wide and on a phone, with one recommendation explained."""
    with demo_service.served(folder) as (address, process):
        wait_for(f"{address}/health", process)
        for width, end in ((WIDTH, ""), (PHONE, "-phone")):
            for scheme in SCHEMES:
                show_as(driver, width, HEIGHTS["service"], scheme)
                driver.get(f"{address}/?{'&'.join(f'history={film}' for film in WATCHED)}")
                wait = WebDriverWait(driver, PAGE_SECONDS)
                wait.until(expected_conditions.element_to_be_clickable((By.CSS_SELECTOR, ".champion button"))).click()
                driver.find_element(By.ID, "search").send_keys("glass")
                wait.until(expected_conditions.presence_of_element_located((By.CSS_SELECTOR, "#found button")))
                path = output / f"service{end}{'-dark' if scheme == 'dark' else ''}.png"
                fit(driver, width, scheme)
                save(driver, path)
                Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def fit(driver: WebDriver, width: int, scheme: str) -> None:
    """Make the window as high as its page."""
    show_as(driver, width, driver.execute_script("return document.documentElement.scrollHeight"), scheme)


def models(uri: str, experiment: str) -> tuple[Mapping[str, str], str]:
    """Return the models' runs of the newest pipeline run by name, and the id of their experiment."""
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"]) if found else []
    if not runs:
        sys.exit(f"no runs of the experiment {experiment!r} in mlflow.db: run `make repro` first")
    parent = next(run.info.run_id for run in runs if PARENT not in run.data.tags)
    children = {run.info.run_name: run.info.run_id for run in runs if run.data.tags.get(PARENT) == parent}
    return {name: run_id for name, run_id in children.items() if name not in leaderboard.BASELINES}, found.experiment_id


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


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[WebDriver]:
    """Start the browser, without a window, and stop it."""
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        yield driver


def show_as(driver: WebDriver, width: int, height: int, scheme: str) -> None:
    """Give the browser the size of a window or a phone, and its reader's taste in colours."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    taste = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", taste)


def save(driver: WebDriver, path: Path) -> None:
    """Write what the browser shows."""
    time.sleep(SETTLE_SECONDS)
    driver.save_screenshot(str(path))


if __name__ == "__main__":
    main()
