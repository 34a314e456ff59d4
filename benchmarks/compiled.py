"""Whether torch.compile pays for SASRec on this machine: time of forward and backward pass, eager and compiled.

    python -m benchmarks.compiled

Our dropout draws bits and views them as smaller integers, which torch.compile cannot trace: it is either left out of
the compiled graphs, which breaks them in pieces, or replaced by torch's own, which the compiler fuses.

The engine's batches have many shapes (each length bucket its own), so the model is compiled with dynamic shapes; the
figures are for several shapes after each was seen once, with the time that compiling took beside them.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import meter
from benchmarks.meter import Cost
from seqrec.models import Batch, Catalogue
from seqrec.models.layers import Dropout
from seqrec.models.sasrec import SASRec
from seqrec.training import loop

SHAPES = ((660, 24), (260, 56), (130, 104), (70, 200))  # (users, length): batches of like work, as the engine's
NUM_ITEMS = 3416


def step(forward: Callable[[Batch], Tensor], batch: Batch, bf16: bool) -> None:
    """Run forward and backward pass without the loss, which is not compiled."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        forward(batch).float().sum().backward()


def measure(forward: Callable[[Batch], Tensor], bf16: bool, repeats: int) -> tuple[Cost, list[Cost]]:
    """Return what the first pass over the shapes cost, and the median of each shape after it."""
    batches = []
    for users, length in SHAPES:
        items = torch.randint(1, NUM_ITEMS + 1, (users, length))
        batches.append(Batch(items, torch.zeros(users, length), torch.ones(users).long()))
    first = meter.cost_of(lambda: [step(forward, batch, bf16) for batch in batches])
    costs = [[meter.cost_of(lambda: step(forward, batch, bf16)) for batch in batches] for _ in range(repeats)]  # noqa: B023
    return first, [Cost(*(median(values) for values in zip(*shape, strict=True))) for shape in zip(*costs, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loop.keep_freed_memory()
    torch.manual_seed(0)
    eager = SASRec(SASRec.Options(length=200, dropout=0.2), Catalogue(NUM_ITEMS, 1, 200))
    around, whole = copy.deepcopy(eager), copy.deepcopy(eager)
    for part in around.modules():
        if isinstance(part, Dropout):
            part.forward = torch.compiler.disable(part.forward)
    for part in list(whole.modules()):
        for name, child in part.named_children():
            if isinstance(child, Dropout):
                setattr(part, name, nn.Dropout(child.p))
    around, whole = (torch.compile(model, dynamic=True) for model in (around, whole))
    rows = []
    for precision in ("fp32", "bf16"):
        for name, forward in (("eager", eager), ("compiled around dropout", around), ("compiled, nn.Dropout", whole)):
            first, costs = measure(forward, precision == "bf16", options.repeats)
            cells = [f"{1e3 * cost.wall:,.0f} ms, {1e3 * cost.cpu:,.0f} ms CPU" for cost in costs]
            rows.append((f"{name}, {precision}", *cells, f"{first.wall:,.0f} s"))
            print(rows[-1], file=sys.stderr, flush=True)
    header = ("SASRec, forward and backward", *(f"{users} x {length}" for users, length in SHAPES), "first pass")
    print(f"{meter.machine(options.threads)}.\n\n{meter.markdown(header, rows)}")


if __name__ == "__main__":
    main()
