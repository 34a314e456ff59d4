"""How fast the service answers over HTTP: latency of one connection, and throughput of many, by wrk on the same cores.

    python -m benchmarks.serving --saved artifacts/sasrec/finetuned --sequences data/sequences

Histories are those of the dataset's users, whole, in random order. They come with the request, or from the store of
events (SQLite) by user alone; the store also takes what was shown. Once more the model is replaced in the middle of the
time. No request may fail. An ONNX graph beside the weights is used, as by `serve`. wrk comes with Debian: `apt-get
install wrk`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import requests
import uvicorn

from seqrec.config import RegisterConfig, ServeConfig
from seqrec.serving import http
from seqrec.serving.events import Event, Store
from seqrec.serving.recommender import Recommender

BODIES = 500
CONNECTIONS = (1, 16, 32, 64)
KINDS = ("history", "history, a switch", "user, store")  # what a request holds, and what happens meanwhile
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
POLL_S = 0.2
SCRIPT = """
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
local number = 0
request = function()
  number = number %% #bodies + 1
  return wrk.format(nil, "/recommend", nil, bodies[number])
end
"""


def histories(folder: Path) -> list[list[str]]:
    """Return the histories of some users."""
    from seqrec.data import sequences  # imports torch, which is not to be in the process of the service

    data, item_ids = sequences.load(folder), sequences.read_items(folder)
    users = random.Random(0).sample(range(data.num_users), min(BODIES, data.num_users))
    return [[item_ids[item - 1] for item in data.items[data.start[u] : data.stop[u]].tolist()] for u in users]


def write_script(folder: Path, name: str, requests: list[dict[str, object]]) -> Path:
    """Write what wrk sends."""
    bodies = folder / f"{name}.jsonl"
    bodies.write_text("".join(json.dumps({**request, "k": 10}) + "\n" for request in requests), encoding="utf-8")
    script = folder / f"{name}.lua"
    script.write_text(SCRIPT % bodies, encoding="utf-8")
    return script


def fill(url: str, past: list[list[str]]) -> None:
    """Write histories into a store: user `u3` has the fourth one."""
    store = Store(url)
    for user, items in enumerate(past):
        store.add(
            [
                Event(event_id=f"{user}-{n}", user=f"u{user}", item=item, kind="view", at=1e9 + n)
                for n, item in enumerate(items)
            ]
        )


def serve(saved: Path, version: Path, url: str, port: int) -> None:
    """Serve until killed, as `seqrec serve` does; when the content of `version` changes, the model is loaded anew."""
    options = ServeConfig(poll_s=POLL_S)

    def load() -> Recommender:
        return http.loaded(str(saved), RegisterConfig(), options)

    service = http.app(load, version.read_text, options, store=Store(url) if url else None)
    uvicorn.run(service, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def started(saved: Path, version: Path, url: str) -> tuple[BaseProcess, str]:
    """Start the service in a process of its own; return it and its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(saved, version, url, port))
    process.start()
    address = f"http://127.0.0.1:{port}"
    while process.is_alive():
        try:
            requests.get(f"{address}/health", timeout=1)
        except requests.RequestException:
            time.sleep(0.1)
        else:
            return process, address
    raise SystemExit("the service has ended")


def milliseconds(text: str, percentile: str) -> float:
    """Return a percentile of the latency that wrk has printed."""
    found = re.search(rf"{percentile}%\s+([\d.]+)(us|ms|s)\b", text)
    assert found, text
    return float(found[1]) * UNITS[found[2]]


def processor_seconds(process: BaseProcess) -> float:
    """Return for how long the service has worked."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def measure(process: BaseProcess, address: str, script: Path, connections: int, seconds: int) -> list[str]:
    """Return cells of the table: connections, requests/s, two percentiles, processor milliseconds of the service."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s", "--latency"]
    command += ["-s", str(script), address]
    before = processor_seconds(process)
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    worked = processor_seconds(process) - before
    assert "Non-2xx" not in text, text
    assert "Socket errors" not in text, text
    rate, number = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"(\d+) requests in", text)
    assert rate, text
    assert number, text
    cost = 1000 * worked / max(1, int(number[1]))
    return [
        str(connections),
        f"{float(rate[1]):.0f}",
        *(f"{milliseconds(text, p):.1f}" for p in ("50", "99")),
        f"{cost:.2f}",
    ]


def rows_of(kind: str, folder: Path, saved: Path, script: Path, seconds: int) -> list[list[str]]:
    """Return the rows of one kind of requests."""
    version = folder / "version"
    version.write_text("1")
    url = f"sqlite:///{folder}/events.db" if "store" in kind else ""
    process, address = started(saved, version, url)
    rows = []
    try:
        measure(process, address, script, 8, 2)  # warm-up
        for turn, connections in enumerate(CONNECTIONS, start=2):
            if "switch" in kind:
                threading.Timer(seconds / 2, version.write_text, [str(turn)]).start()
            rows.append([kind, *measure(process, address, script, connections, seconds)])
        while "switch" in kind and requests.get(f"{address}/health", timeout=5).json()["version"] != str(turn):
            time.sleep(POLL_S)  # a run without its switch never ends
    finally:
        process.terminate()
        process.join()
    return rows


def main() -> None:
    """Print the table."""
    from benchmarks import meter  # imports torch, like `sequences` above

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--sequences", type=Path, required=True, help="the prepared dataset it was trained on")
    parser.add_argument("--seconds", type=int, default=10, help="of each row")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder, past = Path(directory), histories(arguments.sequences)
        fill(f"sqlite:///{folder}/events.db", past)
        given = write_script(folder, "given", [{"history": items} for items in past])
        known = write_script(folder, "known", [{"user": f"u{user}"} for user in range(len(past))])
        for kind in KINDS:
            script = known if "user" in kind else given
            rows += rows_of(kind, folder, arguments.saved, script, arguments.seconds)
    print(meter.machine(os.cpu_count() or 1), "\n")
    headings = ["request", "connections", "requests/s", "p50 ms", "p99 ms", "processor ms a request"]
    print(meter.markdown(headings, rows))


if __name__ == "__main__":
    main()
