"""CPU time of training until validation is as good as the best of RePlay's and of RecTools' SASRec.

    python -m benchmarks.quality --sequences data/sequences --threads 1

Every contestant trains until validation has not improved for `--patience` epochs. RePlay and RecTools have the settings
of peers.py, ours those that the rules choose (params.yaml), without the count term; one more has the count term, as by
default, after one epoch, and all its CPU seconds. Those of the others' validation are not counted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import meter, peers
from seqrec.config import load
from seqrec.data import sequences
from seqrec.evaluation.metrics import SELECTION
from seqrec.stages.finetune import finetune
from seqrec.stages.pretrain import pretrain
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.validation import validate

OURS = ("sasrec", "flash4rec")
BY_RULE = "ml-latest-small"  # a dataset of params.yaml without settings of its own


class Epoch(NamedTuple):
    """The state after an epoch."""

    seconds: float  # CPU seconds of training so far
    ndcg: float  # NDCG@10 on validation


def main() -> None:
    """Train every contestant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=Path, required=True, help="folder of prepared sequences (LOO-full)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better validation before the end")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    runs = {}
    for name in OURS:
        runs[f"ours, {name}"] = ours(name, options.sequences)
    runs["ours, flash4rec, one epoch and counts"] = ours("flash4rec", options.sequences, epochs=1, counts="auto")
    for name in peers.REQUIREMENTS:
        peers.make_environment(name)
        epochs = peers.measure(peers.CONTESTANTS[name], options.sequences, warmup=0, patience=options.patience)
        runs[f"{name}, sasrec"] = [Epoch(*epoch) for epoch in epochs]
        print(f"{name}: {runs[f'{name}, sasrec']}", file=sys.stderr, flush=True)
    print(f"{meter.machine(options.threads)}\n\n{report(runs)}")


def ours(name: str, folder: Path, **changes: Any) -> list[Epoch]:
    """Return the epochs of a model, by the rules but for `changes`; with counts, the end alone."""
    params = replace(load(peers.ROOT / "params.yaml"), dataset=BY_RULE)
    ends: list[tuple[float, float]] = []

    def log(record: dict[str, Any], _: int) -> None:
        ends.append((time.process_time(), record[SELECTION]))
        print(f"{name}: {ends[-1]}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        common = {"model": name, "sequences": folder, "initial": out / "initial", "filter_seen": True}
        start = params.section("pretrain", model=name)
        # the folder has no table of items, so the model reads no text
        pretrain(**common, data=out, state=out / "state", architecture=params.model(name), config=start)
        config = replace(params.section("finetune", model=name), **{"counts": "none", **changes})
        began = time.process_time()
        finetune(**common, state=out / "state", checkpoint=out / "finetuned", config=config, log=log)
        ended = time.process_time()
        trained, data = load_checkpoint(out / "finetuned"), sequences.load(folder)
    if trained.count_term is not None:
        found = trained.card["counts"]["valid/ndcg@10"]["cross_fitted"]
        return [Epoch(ended - began, found)]
    model = trained.model
    validation = meter.cost_of(lambda: validate(model, data, filter_seen=True)).cpu
    return [Epoch(end - began - number * validation, ndcg) for number, (end, ndcg) in enumerate(ends, start=1)]


def report(runs: dict[str, list[Epoch]]) -> str:
    """Return the table: for each contestant, CPU minutes until it is as good as the best of each peer."""
    goals = {name: max(e.ndcg for e in epochs) for name, epochs in runs.items() if not name.startswith("ours")}
    rows = []
    for name, epochs in runs.items():
        cells = [f"{max(epoch.ndcg for epoch in epochs):.4f}", f"{len(epochs)}"]
        for goal, value in goals.items():
            took, theirs = (next((e.seconds for e in runs[who] if e.ndcg >= value), math.inf) for who in (name, goal))
            cells.append("not reached" if took == math.inf else f"{took / 60:.1f} ({theirs / took:.1f} x sooner)")
        rows.append((name, *cells))
    heads = [f"CPU minutes to the best of {goal} ({value:.4f})" for goal, value in goals.items()]
    return meter.markdown(("contestant", "best validation NDCG@10", "epochs", *heads), rows)


if __name__ == "__main__":
    main()
