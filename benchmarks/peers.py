"""Our SASRec against RePlay's and RecTools': the same model, data and settings in one run, each in its own environment.

    python -m benchmarks.peers --sequences data/sequences

The contestants take turns, every one in a process of its own, so that a noisy minute hits all of them; CPU seconds
stand beside wall time for the same reason. The peers' environments are made in build/peers on the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import flops, meter, peer_data
from seqrec.artifacts import SPLIT_CARD
from seqrec.models.sasrec import SASRec
from seqrec.training.utilisation import matmul_peak

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "peers"
TORCH = "torch==2.13.0"  # first and pinned, or pip would fetch another build beside the peers
REQUIREMENTS = {"replay": "replay-rec[torch]==0.22.0", "rectools": "rectools[torch]==0.19.0"}
READER = "pyarrow<24"  # the last that reads with the NumPy 1.26 of RecTools

MODEL = {"length": 200, "d_model": 64, "layers": 2, "heads": 2, "dropout": 0.2, "attention_dropout": 0.0}
SETTINGS = {
    **MODEL,
    "batch_size": 128,
    "rank_batch_size": 128,  # of the peers; the best of 32 to 512
    "top_k": 10,
    "patience": 0,  # of the peers: 0 = one epoch; otherwise train on, see quality.py
    "warmup": 5,  # steps of the peers before the clock starts; ours warms up for an epoch
}
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


@dataclass(frozen=True)
class Contestant:
    """A module of this folder, the interpreter that runs it, and the precision it trains in."""

    module: str
    precision: str
    environment: str = ""  # of a peer

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(ENVIRONMENTS / self.environment / "bin" / "python") if self.environment else sys.executable


CONTESTANTS = {
    "ours": Contestant("ours", "fp32"),
    "ours-bf16": Contestant("ours", "bf16"),
    "replay": Contestant("peer_replay", "fp32", "replay"),
    "replay-bf16": Contestant("peer_replay", "bf16", "replay"),
    "rectools": Contestant("peer_rectools", "fp32", "rectools"),
    "rectools-bf16": Contestant("peer_rectools", "bf16", "rectools"),
}
MEASURES: dict[str, Callable[[dict[str, float]], float]] = {
    "targets/s": lambda run: run["targets"] / run["train_wall"],
    "targets per CPU-second": lambda run: run["targets"] / run["train_cpu"],
    "users/s": lambda run: run["ranked"] / run["rank_wall"],
    "users per CPU-second": lambda run: run["ranked"] / run["rank_cpu"],
}


def main() -> None:
    """Set up, run the rounds, print the tables."""
    options = _arguments()
    names = options.contestants.split(",")
    for name in names:
        if environment := CONTESTANTS[name].environment:
            make_environment(environment)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    peak = matmul_peak(torch.device("cpu"), "fp32")
    for number in range(options.rounds):
        for name in names:
            runs[name].append(measure(CONTESTANTS[name], options.sequences, options.users))
            print(f"round {number + 1}, {name}: {json.dumps(runs[name][-1])}", file=sys.stderr, flush=True)
        peak = max(peak, matmul_peak(torch.device("cpu"), "fp32"))
    print(report(runs, peak, needed_flops(options.sequences, options.users), options.threads))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=Path, required=True, help="folder of prepared sequences (LOO-full)")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="in the order of their turns")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--users", type=int, default=0, help="the first so many users alone, for a quick look; 0 = all")
    options = parser.parse_args()
    if not (options.sequences / SPLIT_CARD).is_file():
        parser.error(f"--sequences: {options.sequences} holds no prepared dataset")
    return options


def make_environment(name: str) -> None:
    """Create build/peers/`name`, unless it holds the wanted versions already."""
    folder, wanted = ENVIRONMENTS / name, f"{TORCH}\n{READER}\n{REQUIREMENTS[name]}\n"
    marker = folder / "installed.txt"
    if marker.exists() and marker.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    constraints = ENVIRONMENTS / "constraints.txt"
    constraints.write_text(f"{TORCH}\n{READER}\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "pyarrow", REQUIREMENTS[name]], check=True)
    marker.write_text(wanted)


def measure(contestant: Contestant, sequences: Path, users: int = 0, **settings: int) -> Any:
    """Run a contestant once, on the first `users` users (0 = all), and return the figures it prints."""
    # autocast and RePlay's buckets do not go together: they assign bf16 into an fp32 tensor
    values = SETTINGS | {"replay_bucket": 0 if contestant.precision == "bf16" else 32} | settings
    command = [contestant.python, "-m", f"benchmarks.{contestant.module}", "--settings", json.dumps(values)]
    command += ["--sequences", str(sequences.resolve()), "--users", str(users)]
    command += ["--precision", contestant.precision]
    environment = os.environ | (KEEP_FREED if contestant.environment else {})  # ours tells glibc by itself
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def needed_flops(sequences: Path, users: int) -> dict[str, float]:
    """Return the FLOPs per target of a training step and per user of ranking, without any padding."""
    histories = peer_data.read(sequences, users)
    options = SASRec.Options(**MODEL)
    inputs = np.clip(histories.train_stop - histories.start - 1, 0, options.length)
    trained, ranked = inputs[inputs > 0], np.clip(histories.valid_stop - histories.start, 0, options.length)
    return {
        "target": flops.training_flops(SASRec, histories.num_items, trained, options) / trained.sum(),
        "user": flops.ranking_flops(SASRec, histories.num_items, ranked, options) / len(ranked),
    }


def report(runs: dict[str, list[dict[str, float]]], peak: float, needed: dict[str, float], threads: int) -> str:
    """Return the tables: figures of every contestant, then ours against the fastest peer.

    Args:
        runs: the figures of each round, by contestant.
        peak: FLOP per second of an fp32 matrix product.
        needed: FLOPs per target and per user.
        threads: how many every contestant had.
    """
    rates = {
        name: {key: [rate(run) for run in rounds] for key, rate in MEASURES.items()} for name, rounds in runs.items()
    }
    medians = {name: {key: median(values) for key, values in figures.items()} for name, figures in rates.items()}
    lines = [
        f"{meter.machine(threads)}; median of {len(next(iter(runs.values())))} rounds (lowest - highest). "
        f"An fp32 matrix product reaches {peak / 1e9:,.0f} GFLOP/s; a target of training needs "
        f"{needed['target'] / 1e6:.2f} MFLOP, a ranked user {needed['user'] / 1e6:.1f} MFLOP.",
        _figures(runs, rates, {name: value["targets/s"] * needed["target"] / peak for name, value in medians.items()}),
    ]
    peers = [name for name in runs if CONTESTANTS[name].environment]
    ours = [name for name in runs if name not in peers]
    if peers and ours:
        lines.append(_ratios(medians, ours, peers))
    lines += [_evaluation(name, runs[name]) for name in ours]
    return "\n\n".join(lines)


def _figures(
    runs: dict[str, list[dict[str, float]]], rates: dict[str, dict[str, list[float]]], share: dict[str, float]
) -> str:
    rows = []
    for name, rounds in runs.items():
        cells = [f"{median(v):,.0f} ({min(v):,.0f} - {max(v):,.0f})" for v in rates[name].values()]
        memory = max(run["peak"] for run in rounds)
        rows.append((name, *cells, f"{share[name]:.0%}", f"{memory:,.0f}"))
    return meter.markdown(("contestant", *MEASURES, "training, of the fp32 peak", "peak MiB"), rows)


def _ratios(medians: dict[str, dict[str, float]], ours: list[str], peers: list[str]) -> str:
    """Return the table of ours over the fastest peer, which may be another one in each column."""
    rows = []
    for limit in ("fp32", "any precision"):
        chosen = [name for name in peers if limit != "fp32" or CONTESTANTS[name].precision == "fp32"]
        for name in ours if chosen else ():
            cells = []
            for key in MEASURES:
                fastest = max(chosen, key=lambda peer: medians[peer][key])
                cells.append(f"{medians[name][key] / medians[fastest][key]:.2f} ({fastest})")
            rows.append((f"{name} / fastest peer, {limit}", *cells))
    return meter.markdown(("ratio of medians", *MEASURES), rows)


def _evaluation(name: str, rounds: list[dict[str, float]]) -> str:
    wall, cpu = (median(run[f"evaluate_{kind}"] / run[f"train_{kind}"] for run in rounds) for kind in ("wall", "cpu"))
    return f"{name}: validating all users takes {wall:.0%} of the time of a training epoch, {cpu:.0%} in CPU seconds."


if __name__ == "__main__":
    main()
