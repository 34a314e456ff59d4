"""Training from the mapped file beside training from memory: `python -m benchmarks.mapped --sequences DIR`.

The same SASRec on both, in turns; DIR is the `sequences` folder of a prepared dataset, of one shard or of several.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import meter, ours, peers
from seqrec.data import sequences
from seqrec.data.sequences import Flat, Sequences, Shards

HEADER = ("data", "targets/s, median (range)", "CPU s an epoch", "loss")


def in_memory(data: Sequences) -> Sequences:
    """Return a copy whose events are in memory, in one piece."""

    def whole(values: Flat) -> torch.Tensor:
        return torch.cat(list(values.parts)) if isinstance(values, Shards) else values.clone()

    return replace(data, items=whole(data.items), times=whole(data.times))


def compare(data: Sequences, settings: dict[str, Any], rounds: int) -> list[tuple[str, str, str, str]]:
    """Train for three epochs a round on each; return the rows of the table, of the second epochs."""
    shards = len(data.items.parts) if isinstance(data.items, Shards) else 1
    contestants = {"memory": (in_memory(data), True), f"mapped file, shards: {shards}": (data, False)}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (source, resident) in contestants.items():
            torch.manual_seed(0)
            model = ours.model_of(source, settings)
            figures[name].append(ours.train(model, source, settings, "fp32", resident=resident))
    rows = []
    for name, runs in figures.items():
        rates = sorted(run["targets"] / run["train_wall"] for run in runs)
        cpu = statistics.median(run["train_cpu"] for run in runs)
        speed = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} - {rates[-1]:,.0f})"
        rows.append((name, speed, f"{cpu:.1f}", f"{runs[0]['loss']:.6f}"))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=peers.SETTINGS["length"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {**peers.SETTINGS, "length": arguments.length}
    rows = compare(sequences.load(arguments.sequences), settings, arguments.rounds)
    print(f"{meter.machine(arguments.threads)}\n\n{meter.markdown(HEADER, rows)}")


if __name__ == "__main__":
    main()
