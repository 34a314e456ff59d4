"""How fast the service answers over HTTP: latency of one connection, and throughput of many, by wrk on the same cores.

    python -m benchmarks.serving --saved artifacts/sasrec/finetuned --sequences data/sequences

Histories are those of the dataset's users, whole, in random order. `--graph` serves the ONNX graph. wrk comes with
Debian: `apt-get install wrk`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from benchmarks import meter
from seqrec.data import sequences

BODIES = 500
CONNECTIONS = (1, 16, 32, 64)
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
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


def bodies(folder: Path) -> str:
    """Return requests, one a line."""
    data, item_ids = sequences.load(folder), sequences.read_vocabulary(folder)[0]
    users = random.Random(0).sample(range(data.num_users), min(BODIES, data.num_users))
    lines = []
    for user in users:
        items = data.items[data.start[user] : data.stop[user]].tolist()
        lines.append(json.dumps({"history": [item_ids[item - 1] for item in items], "k": 10}))
    return "\n".join(lines) + "\n"


def milliseconds(text: str, percentile: str) -> float:
    """Return a percentile of the latency that wrk has printed."""
    found = re.search(rf"{percentile}%\s+([\d.]+)(us|ms|s)\b", text)
    assert found, text
    return float(found[1]) * UNITS[found[2]]


def measure(address: str, script: Path, connections: int, seconds: int) -> list[str]:
    """Return a row of the table."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), address]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in text, text
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert rate, text
    return [str(connections), f"{float(rate[1]):.0f}", *(f"{milliseconds(text, p):.1f}" for p in ("50", "99"))]


def serve(saved: Path, graph: Path | None, port: int) -> subprocess.Popen[bytes]:
    """Start the service and wait until it answers."""
    command = [sys.executable, "-m", "seqrec", "serve", "--saved", str(saved), "--port", str(port)]
    process = subprocess.Popen(command + (["--graph", str(graph)] if graph else []), env=os.environ)
    while process.poll() is None:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=1)
        except requests.ConnectionError:
            time.sleep(0.1)
        else:
            return process
    raise SystemExit("the service has ended")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--sequences", type=Path, required=True, help="the prepared dataset it was trained on")
    parser.add_argument("--graph", type=Path, help="what `seqrec export` wrote of it")
    parser.add_argument("--seconds", type=int, default=10, help="of each row")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        folder = Path(directory)
        saved = Path(shutil.copytree(arguments.saved, folder / "model"))
        (folder / "bodies").write_text(bodies(arguments.sequences), encoding="utf-8")
        script = folder / "script.lua"
        script.write_text(SCRIPT % (folder / "bodies"), encoding="utf-8")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        service = serve(saved, arguments.graph, port)
        try:
            address = f"http://127.0.0.1:{port}"
            measure(address, script, 8, 2)  # warm-up
            rows = [measure(address, script, number, arguments.seconds) for number in CONNECTIONS]
        finally:
            service.terminate()
            service.wait()
    print(meter.machine(os.cpu_count() or 1), "\n")
    print(meter.markdown(["connections", "requests/s", "p50 ms", "p99 ms"], rows))


if __name__ == "__main__":
    main()
