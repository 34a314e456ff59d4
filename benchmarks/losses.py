"""Peak memory and time of a loss, forward and backward, against the size of the catalogue.

    python -m benchmarks.losses

Every figure comes from a process of its own: the peak is the largest resident size above that of the queries and the
item table. glibc keeps freed blocks, as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import meter
from seqrec.training import cost, losses

NEGATIVES = 256  # of sampled_ce, for all targets together
SECONDS = 4.0  # a measurement repeats its step for about so long
ROOT = Path(__file__).resolve().parents[1]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (N, D), item vectors (V, D), targets (N,) -> mean loss


def naive(query_ND: Tensor, item_VD: Tensor, target_N: Tensor) -> Tensor:
    """Cross-entropy on a matrix of all logits."""
    return F.cross_entropy(query_ND @ item_VD[1:].T, target_N - 1)


def chunked_by_torch(query_ND: Tensor, item_VD: Tensor, target_N: Tensor) -> Tensor:
    """Return torch's own cross-entropy without all logits in memory, at its default chunks."""
    return F.linear_cross_entropy(query_ND, item_VD[1:], target_N - 1, options=torch.nn.LinearCrossEntropyOptions())


def sampled_ce(query_ND: Tensor, item_VD: Tensor, target_N: Tensor, sparse: bool = False) -> Tensor:
    """Return our sampled softmax with uniform negatives."""
    drawn_K = torch.randint(1, len(item_VD), (NEGATIVES,))
    expected_V = torch.tensor(NEGATIVES / (len(item_VD) - 1)).log().expand(len(item_VD))
    return losses.sampled_cross_entropy(query_ND, item_VD, target_N, drawn_K, expected_V, sparse=sparse).mean()


def bce(query_ND: Tensor, item_VD: Tensor, target_N: Tensor, sparse: bool = False) -> Tensor:
    """Return our binary cross-entropy with one uniform negative a target."""
    drawn_NK = torch.randint(1, len(item_VD), (len(target_N), 1))
    return losses.binary_cross_entropy(query_ND, item_VD, target_N, drawn_NK, sparse=sparse).mean()


CASES: dict[str, Loss] = {
    "ce: all logits": naive,
    "ce: F.linear_cross_entropy": chunked_by_torch,
    "ce: ours": lambda *tensors: losses.cross_entropy(*tensors).mean(),
    "ce: ours, bf16 products": lambda *tensors: losses.cross_entropy(*tensors, precision="bf16").mean(),
    "sampled_ce": sampled_ce,
    "bce": bce,
    "sampled_ce and AdamW's step": sampled_ce,
    "sampled_ce, row-sparse, and SparseAdam's step": lambda *tensors: sampled_ce(*tensors, sparse=True),
    "bce, row-sparse, and SparseAdam's step": lambda *tensors: bce(*tensors, sparse=True),
}
if not hasattr(F, "linear_cross_entropy"):  # before torch 2.13
    del CASES["ce: F.linear_cross_entropy"]


def optimizer_of(name: str, item_VD: Tensor) -> torch.optim.Optimizer | None:
    """Return the optimiser whose step the case `name` includes."""
    if name.endswith("AdamW's step"):
        return torch.optim.AdamW([item_VD], fused=True)
    return torch.optim.SparseAdam([item_VD]) if name.endswith("SparseAdam's step") else None


def needed_bytes(name: str, items: int, targets: int, dim: int) -> int:
    """Return about how much memory a case takes, to leave out what does not fit."""
    tables = 4 if "AdamW" in name else 3  # values, gradient or its copy, moments
    return 4 * (tables * items * dim + (3 * items * targets if CASES[name] is naive else 0))


def measure(name: str, items: int, targets: int, dim: int) -> dict[str, float]:
    """Return peak MiB above the inputs, and milliseconds of a step by the clock and of the cores."""
    cost.keep_freed_memory()
    torch.manual_seed(0)
    item_VD = torch.randn(items + 1, dim).mul_(0.02).requires_grad_()
    query_ND = torch.randn(targets, dim).requires_grad_()
    target_N = torch.randint(1, items + 1, (targets,))
    optimizer = optimizer_of(name, item_VD)

    def step() -> None:
        item_VD.grad = query_ND.grad = None
        CASES[name](query_ND, item_VD, target_N).backward()
        if optimizer is not None:
            optimizer.step()

    small_VD, small_ND = torch.randn(9, dim, requires_grad=True), torch.randn(8, dim, requires_grad=True)
    CASES[name](small_ND, small_VD, torch.arange(1, 9)).backward()  # loads what a first call loads
    meter.reset_peak()
    inputs = meter.peak_memory()
    costs = [meter.cost_of(step)]
    peak = meter.peak_memory() - inputs
    while sum(cost.wall for cost in costs) < SECONDS and len(costs) < 50:
        costs.append(meter.cost_of(step))
    warm = costs[1:] or costs
    wall, cpu = (1e3 * median(values) for values in zip(*warm, strict=True))
    return {"peak": max(peak, meter.peak_memory() - inputs), "wall": wall, "cpu": cpu}


def table(options: argparse.Namespace) -> str:
    """Measure every case at every size; return the Markdown table."""
    rows = []
    for name in CASES:
        row = [name]
        for items in options.items:
            if needed_bytes(name, items, options.targets, options.dim) > options.memory * 2**30:
                row.append("does not fit")
                continue
            command = [sys.executable, "-m", "benchmarks.losses", "--case", name, "--items", str(items)]
            command += ["--targets", str(options.targets), "--dim", str(options.dim)]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=options.limit
                )
            except subprocess.TimeoutExpired:
                row.append(f"over {options.limit} s")
                continue
            run = json.loads(done.stdout)
            row.append(f"{run['peak']:,.0f} MiB, {run['wall']:,.0f} ms, {run['cpu']:,.0f} ms CPU")
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return meter.markdown(["loss", *(f"{items:,} items" for items in options.items)], rows)


def main() -> None:
    """Print the table, or one measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--memory", type=float, default=12.0, help="GiB; what needs more is left out")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one figure; what takes longer is left out")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.items[0], options.targets, options.dim)))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    shape = f"{options.targets:,} targets, {options.dim} dimensions"
    print(f"{meter.machine(options.threads)}; {shape}.\n\n{table(options)}")


if __name__ == "__main__":
    main()
