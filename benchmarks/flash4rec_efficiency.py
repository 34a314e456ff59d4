"""What FLASH4Rec costs beside BERT4Rec of its size, on random weights and full histories (paper, table 2).

    python -m benchmarks.flash4rec_efficiency --threads 2

Parameters: with the users' table and without. FLOPs: a multiplication and an addition are two; matrix products as
torch counts them, normalisation and softmax left out; for a history from its items to the query at its end, without and
with the scores of all items. Latency: from histories to the best ten items, best of interleaved rounds. Memory: the
largest sum of live tensor bytes in that pass; weights exist before and do not count.

The second table is about training, which keeps freed memory: forward and backward pass of one block at batch 64,
n = 200, and of its experts alone beside a dense network of the same active FLOPs: as wide as an expert, and wider by
what the router computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import meter
from seqrec.models import bert4rec, flash4rec
from seqrec.models.base import Batch, Catalogue, SequenceModel
from seqrec.models.layers import attention_bias
from seqrec.training.loop import keep_freed_memory

ITEMS, USERS = 3416, 6040  # MovieLens-1M
BATCHES = (1, 64, 512)
TOP = 10
Pass = Callable[[], object]


def pair(length: int) -> dict[str, SequenceModel]:
    """Return BERT4Rec with the size that its row of the paper has (3.08 M parameters), and FLASH4Rec to match it."""
    catalogue = Catalogue(ITEMS, USERS, length)
    shape = {"length": length, "d_model": 256, "layers": 4}
    theirs = bert4rec.BERT4RecOptions(**shape, heads=4, d_inner=512)
    ours = flash4rec.FLASH4RecOptions(
        **shape, objective="cloze", d_shared=64, d_value=256, experts=4, d_expert=120, d_router=32
    )
    return {
        "BERT4Rec": bert4rec.BERT4Rec(theirs, catalogue).eval(),
        "FLASH4Rec": flash4rec.FLASH4Rec(ours, catalogue).eval(),
    }


def histories(batch: int, length: int) -> Batch:
    """Return full random histories that end with MASK."""
    items = torch.randint(1, ITEMS + 1, (batch, length))
    items[:, -1] = ITEMS + 1
    return Batch(items, torch.zeros(batch, length), torch.arange(batch) % USERS + 1)


def recommend(model: SequenceModel, batch: Batch) -> Tensor:
    """Return the best items (B, 10)."""
    return (model(batch, last=True)[:, 0] @ model.item_vectors()[1:].T).topk(TOP).indices


def grouped(rows: Sequence[int], weights: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of a product of rows with their group's weights, which torch's counter takes for none."""
    return 2 * rows[0] * rows[1] * weights[2]


def counted(call: Pass) -> int:
    """Return the FLOPs of the matrix products of `call`; the CPU's fused attention would be taken for none, too."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return int(counter.get_total_flops())


def size(model: SequenceModel, length: int) -> list[str]:
    """Return parameters in millions with and without users, and FLOPs per history in millions, encoder and all."""
    batch = histories(1, length)
    number = sum(p.numel() for p in model.parameters())
    users = getattr(model, "users", None)
    table = users.weight.numel() if users is not None else 0
    encoder, everything = counted(lambda: model(batch, last=True)), counted(lambda: recommend(model, batch))
    return [f"{x / 1e6:.2f}" for x in (number, number - table, encoder, everything)]


@torch.inference_mode()
def serving(length: int, budget: float) -> str:
    """Return the table of sizes, latencies and peaks."""
    models = pair(length)
    cells = {name: size(model, length) for name, model in models.items()}
    header = ["model", "M parameters", "without users", "M FLOPs, encoder", "with scores"]
    for rows in BATCHES:
        batch = histories(rows, length)
        passes = {name: partial(recommend, model, batch) for name, model in models.items()}
        best = meter.best_seconds(passes, budget)
        for name, call in passes.items():
            cells[name] += [f"{best[name] * 1e3:.2f}", f"{meter.peak_bytes(call) / 1e6:.1f}"]
        header += [f"batch {rows}: CPU ms", "peak MB"]
    return meter.markdown(header, [[name, *row] for name, row in cells.items()])


def training(d_model: int, budget: float, rows: int = 64, length: int = 200) -> list[list[str]]:
    """Return rows of the table about one block: BERT4Rec's, FLASH4Rec's, experts, and their dense counterpart."""
    d_inner = 2 * d_model  # what BERT4Rec of the paper's size has
    theirs = bert4rec.BERT4RecOptions(d_model=d_model, heads=4, d_inner=d_inner, dropout=0.0)
    switches = {"d_model": d_model, "d_shared": 64, "d_value": d_model, "dropout": 0.0}
    ours = flash4rec.FLASH4RecOptions(**switches, d_expert=d_model, topk_dropout=0.0)
    dropping = flash4rec.FLASH4RecOptions(**switches, d_expert=d_model, topk_dropout=0.1)
    x, user = torch.randn(rows, length, d_model, requires_grad=True), torch.randn(rows, d_model)
    real, bias = torch.ones(rows, length).bool(), attention_bias(torch.ones(rows, length).long(), causal=False)
    everything = slice(None)

    def step(block: nn.Module, *inputs: object) -> Pass:
        def call() -> None:
            out = block(*inputs)
            (out[0] if isinstance(out, tuple) else out).sum().backward()

        return call

    blocks = {
        "block, BERT4Rec": step(bert4rec.Block(theirs), x, bias, everything),
        "block, FLASH4Rec": step(flash4rec.Block(ours), x, user, bias, real, everything),
        "block, FLASH4Rec, Top-K dropout": step(flash4rec.Block(dropping), x, user, bias, real, everything),
    }
    table = compared(blocks, d_model, budget)
    for d_expert in (d_model, 2 * d_model):
        options = flash4rec.FLASH4RecOptions(d_model=d_model, d_expert=d_expert)
        routing = options.d_router * (d_model + options.experts)
        equal = flash4rec.FLASH4RecOptions(d_model=d_model, d_expert=d_expert + round(routing / (2 * d_model)))
        networks = {
            f"dense network, {equal.d_expert} wide": step(flash4rec.FeedForward(equal), x, real),
            f"4 experts, {d_expert} wide, 1 a token, with router": step(flash4rec.Experts(options), x, real),
        }
        table += compared(networks, d_model, budget)
    return table


def compared(calls: dict[str, Pass], d_model: int, budget: float) -> list[list[str]]:
    """Return a row of the table for each call, with its ratio to the first."""
    best = meter.best_seconds(calls, budget)
    base = next(iter(best.values()))
    return [[name, str(d_model), f"{best[name] * 1e3:.0f}", f"{best[name] / base:.2f}"] for name in calls]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=50, help="events in a history, MASK included")
    parser.add_argument("--d-model", type=int, nargs="+", default=[64, 128, 256], help="widths of the second table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, each row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    print(meter.machine(arguments.threads), "\n")
    print(serving(arguments.length, arguments.seconds), "\n")
    rows = [row for d_model in arguments.d_model for row in training(d_model, arguments.seconds)]
    print(meter.markdown(["forward and backward pass", "d_model", "CPU ms", "ratio"], rows))


if __name__ == "__main__":
    main()
