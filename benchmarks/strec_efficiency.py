"""What sparse queries save: time and memory of STRec against its backbone, on random weights and histories.

    OMP_NUM_THREADS=1 python benchmarks/strec_efficiency.py --figure docs/images/strec-efficiency.svg
    OMP_NUM_THREADS=1 python benchmarks/strec_efficiency.py --graph  # one history at a time in ONNX Runtime

Time is that of the CPU (on a GPU the clock's, synchronised), the best of interleaved rounds, so that other work on the
machine weighs on all alike. Memory is the largest sum of live tensor bytes by the allocator's own events; weights, the
item table and the inputs exist before and do not count. `all rows` computes every row in every layer, as the paper's
backbone does; `last row` leaves out what nobody reads in the last layer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import onnxruntime
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import meter  # noqa: E402 - found through the path above
from seqrec.models.base import Batch, Catalogue  # noqa: E402 - found through the path above
from seqrec.models.strec import STRec, STRecOptions  # noqa: E402
from seqrec.serving.onnx_graph import GRAPH, graph  # noqa: E402

SPARSITIES = (0.0, 0.42, 0.58, 0.69, 0.72, 0.77, 0.9, 0.98)
OFFICIAL_K = (50, 20, 20, 5, 5, 5, 5, 1)  # for 50 events and 8 layers
TOP = 10
REFERENCE = "backbone, all rows"


class Row(NamedTuple):
    """What one network costs."""

    n: int
    batch: int
    name: str
    sparsity: float | None  # mean share of rows that are not computed; None for drop-ins, which compute all
    encoder: float  # seconds
    total: float  # seconds, with scores of all items and the best ten
    peak: int  # bytes


class AllRows(STRec):
    """A network that computes what nobody reads of its last layer, too."""

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return the query of the last event (B, 1, D)."""
        return super().forward(batch)[:, -1:]


def networks(n: int, layers: int, d_model: int, heads: int, num_items: int) -> dict[str, STRec]:
    """Return the networks to compare, by name; the first is the reference."""
    shape = {"length": n, "layers": layers, "d_model": d_model, "heads": heads}
    options = {REFERENCE: {"sampling": "none"}, "backbone, last row": {"sampling": "none"}}
    options |= {f"STRec, k = {round(n * (1 - s))}": {"sparsity": s} for s in SPARSITIES}
    if layers == len(OFFICIAL_K):
        options["STRec, official k"] = {"k": tuple(max(1, round(k * n / OFFICIAL_K[0])) for k in OFFICIAL_K)}
    for attention, size in (("linformer", n // 4), ("informer", 5), ("longformer", n // 5)):
        options[f"{attention}, {size}"] = {"sampling": "none", "attention": attention, "attention_size": size}
    catalogue = Catalogue(num_items=num_items, num_users=1, length=n)
    kinds = {name: AllRows if name == REFERENCE else STRec for name in options}
    return {name: kinds[name](STRecOptions(**shape, **own), catalogue).eval() for name, own in options.items()}


def histories(batch: int, n: int, num_items: int) -> Batch:
    """Return full random histories."""
    generator = torch.Generator().manual_seed(0)
    items = torch.randint(1, num_items + 1, (batch, n), generator=generator)
    times = -torch.rand(batch, n, generator=generator).mul(1e7).sort(dim=1, descending=True).values
    return Batch(items, times - times[:, -1:], torch.ones(batch, dtype=torch.int64))


def encoder(model: STRec, batch: Batch) -> Callable[[], Tensor]:
    """Return the pass from histories to queries."""
    return lambda: model(batch, last=True)[:, 0]


def ranker(model: STRec, batch: Batch) -> Callable[[], Tensor]:
    """Return the pass from histories to the best items."""
    encode = encoder(model, batch)
    return lambda: (encode() @ model.item_vectors()[1:].T).topk(TOP).indices


@torch.inference_mode()
def measure(n: int, batch: int, arguments: argparse.Namespace) -> list[Row]:
    """Return the cost of every network for one shape of input."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (arguments.layers, arguments.d_model, arguments.heads, arguments.items)
    models = {name: model.to(device) for name, model in networks(n, *shape).items()}
    inputs = Batch(*(x.to(device) for x in histories(batch, n, arguments.items)))
    peaks = {name: meter.peak_bytes(encoder(model, inputs)) for name, model in models.items()}
    encode, total = (
        meter.best_seconds(
            {name: kind(model, inputs) for name, model in models.items()}, arguments.seconds, arguments.rounds
        )
        for kind in (encoder, ranker)
    )
    return [
        Row(n, batch, name, _sparsity(name, m), encode[name], total[name], peaks[name]) for name, m in models.items()
    ]


def served(model: STRec, batch: Batch) -> Callable[[], object]:
    """Return the same pass as `ranker` in ONNX Runtime, on as many threads as torch uses."""
    program, given = graph(model, TOP)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / GRAPH)
        session = onnxruntime.InferenceSession(Path(folder) / GRAPH, options)
    inputs = {"items": batch.items, "times": batch.times, "hidden": torch.zeros(len(batch.items), 0, dtype=torch.int64)}
    fed = {name: inputs[name].numpy() for name in given}
    return lambda: session.run(None, fed)


def measure_graphs(n: int, arguments: argparse.Namespace) -> str:
    """Return a Markdown table of the time from a history to the best items, one history at a time, in ONNX Runtime."""
    models = networks(n, arguments.layers, arguments.d_model, arguments.heads, arguments.items)
    batch = histories(1, n, arguments.items)
    passes = {name: served(m, batch) for name, m in models.items() if m.options.attention == "full"}
    times = meter.best_seconds(passes, arguments.seconds, arguments.rounds)
    lines = [
        f"n = {n}, batch 1, ONNX Runtime",
        "",
        "| network | mean sparsity | ms | of backbone |",
        "|---|---|---|---|",
    ]
    for name, spent in times.items():
        share = f"{_sparsity(name, models[name]):.1%}"
        lines.append(f"| {name} | {share} | {spent * 1e3:.2f} | {spent / times[REFERENCE]:.0%} |")
    return "\n".join([*lines, ""])


def _sparsity(name: str, model: STRec) -> float | None:
    if model.options.attention != "full":
        return None
    rows = model.options.rows if name != REFERENCE else (model.options.length,)
    return 1 - sum(rows) / len(rows) / model.options.length


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of `rows`, which share their input's shape, the reference first."""
    base = rows[0]
    lines = [
        f"n = {base.n}, batch {base.batch}",
        "",
        "| network | mean sparsity | encoder ms | of backbone | end to end ms | of backbone | peak MB | of backbone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sparsity = "-" if row.sparsity is None else f"{row.sparsity:.1%}"
        lines.append(
            f"| {row.name} | {sparsity} | {row.encoder * 1e3:.2f} | {row.encoder / base.encoder:.0%} "
            f"| {row.total * 1e3:.2f} | {row.total / base.total:.0%} "
            f"| {row.peak / 1e6:.2f} | {row.peak / base.peak:.0%} |"
        )
    return "\n".join([*lines, ""])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the shares of the backbone's time and memory against sparsity to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    shapes = sorted({(row.n, row.batch) for row in rows})
    for axis, key in zip(axes, ("encoder", "total", "peak"), strict=True):
        for n, batch in shapes:
            mine = [row for row in rows if (row.n, row.batch) == (n, batch)]
            swept = [row for row in mine if row.name.startswith("STRec, k") and row.sparsity is not None]
            share = [getattr(row, key) / getattr(mine[0], key) for row in swept]
            axis.plot([row.sparsity for row in swept], share, marker=".", label=f"n = {n}, batch {batch}")
        axis.set(xlabel="mean share of rows not computed", title={"total": "time, end to end"}.get(key, key))
        axis.axvspan(0.69, 0.72, alpha=0.15)
    axes[0].set(ylabel="of the backbone's", ylim=(0, 1.05), title="time, encoder")
    axes[2].set(title="peak memory, encoder")
    axes[2].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Print a table for every shape of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 2048])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--items", type=int, default=3416, help="size of the catalogue, for the end-to-end time")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, each network and kind of pass")
    parser.add_argument("--rounds", type=int, default=3, help="in which they take turns, at least")
    parser.add_argument("--graph", action="store_true", help="the exported graphs, one history at a time")
    parser.add_argument("--figure", type=Path, help="where to draw the shares against sparsity")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)\n")
    everything: list[Row] = []
    for n in arguments.n if arguments.graph else ():
        print(measure_graphs(n, arguments), flush=True)
    for n in () if arguments.graph else arguments.n:
        for batch in arguments.batch:
            rows = measure(n, batch, arguments)
            print(table(rows), flush=True)
            everything += rows
    if arguments.figure:
        draw(everything, arguments.figure)


if __name__ == "__main__":
    main()
