"""What sparse queries save: time and memory of STRec against its backbone, on random weights and histories.

Times are the best of rounds in which the networks take turns, in torch and, for one history at a time, as an ONNX
graph with the ranking of all items. Memory is the largest sum of tensor bytes that a pass has allocated and not freed.
`all rows` computes every row in every layer, as the paper's backbone; `last row` leaves out what nobody reads.

    OMP_NUM_THREADS=1 python -m benchmarks.strec_efficiency --out runs/strec-efficiency
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from benchmarks import meter
from seqrec.artifacts import write_text
from seqrec.models.base import Batch, Catalogue
from seqrec.models.strec import SPARSITIES, STRec, STRecOptions
from seqrec.serving.onnx_graph import GRAPH, graph

SHAPE = {"layers": 8, "d_model": 128, "heads": 4}
ITEMS = 3416
OFFICIAL_K = (50, 20, 20, 5, 5, 5, 5, 1)  # for 50 events and 8 layers
ALL, LAST = "backbone, all rows", "backbone, last row"
TOP, SECONDS, ROUNDS = 10, 1.0, 3  # items to rank; of measuring each network, in so many rounds


class AllRows(STRec):
    """A network that also computes what nobody reads of its last layer."""

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return the query of the last event (B, 1, D)."""
        return super().forward(batch)[:, -1:]


def networks(n: int) -> dict[str, STRec]:
    """Return the networks to compare, by name; the first is the reference."""
    options = {ALL: {"sampling": "none"}, LAST: {"sampling": "none"}}
    options |= {f"STRec, k = {round(n * (1 - share))}": {"sparsity": share} for share in SPARSITIES[1:]}
    options["STRec, official k"] = {"k": tuple(max(1, round(k * n / OFFICIAL_K[0])) for k in OFFICIAL_K)}
    for attention, size in (("linformer", n // 4), ("informer", 5), ("longformer", n // 5)):
        options[attention] = {"sampling": "none", "attention": attention, "attention_size": size}
    catalogue = Catalogue(num_items=ITEMS, num_users=1, length=n)
    return {
        name: (AllRows if name == ALL else STRec)(STRecOptions(length=n, **SHAPE, **own), catalogue).eval()
        for name, own in options.items()
    }


def histories(batch: int, n: int) -> Batch:
    """Return full random histories."""
    times = -torch.rand(batch, n, dtype=torch.float64).mul(1e7).sort(dim=1, descending=True).values
    return Batch(torch.randint(1, ITEMS + 1, (batch, n)), times - times[:, -1:], torch.ones(batch, dtype=torch.int64))


def best_seconds(passes: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each pass's shortest time."""
    best = dict.fromkeys(passes, float("inf"))
    for _ in range(ROUNDS):
        for name, work in passes.items():
            work()  # warm
            end = time.perf_counter() + SECONDS / ROUNDS
            while (began := time.perf_counter()) < end:
                work()
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def encoder(model: STRec, batch: Batch) -> Callable[[], Tensor]:
    """Return the pass from histories to queries (B, D)."""
    return lambda: model(batch, last=True)[:, 0]


def served(model: STRec, batch: Batch) -> Callable[[], object]:
    """Return the pass from histories to their best items, in ONNX Runtime."""
    program, given = graph(model, TOP, None)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / GRAPH)
        session = onnxruntime.InferenceSession(Path(folder) / GRAPH, options)
    inputs = {"items": batch.items, "times": batch.times, "hidden": torch.zeros(len(batch.items), 0, dtype=torch.int64)}
    fed = {name: inputs[name].numpy() for name in given}
    return lambda: session.run(None, fed)


def left_out(name: str, model: STRec) -> str:
    """Return the share of rows that the layers do not compute."""
    rows = (model.options.length,) if name == ALL else model.options.rows
    return f"{1 - sum(rows) / len(rows) / model.options.length:.1%}" if model.options.attention == "full" else "-"


@torch.inference_mode()
def table(n: int, batches: list[int]) -> str:
    """Return the costs as Markdown: absolute for the reference, shares of it for the others."""
    models = networks(n)
    columns = ["ONNX graph"]
    graphs = {name: served(model, histories(1, n)) for name, model in models.items() if left_out(name, model) != "-"}
    figures = [{name: (spent,) for name, spent in best_seconds(graphs).items()}]
    for size in batches:
        inputs = histories(size, n)
        passes: dict[str, Callable[[], object]] = {name: encoder(model, inputs) for name, model in models.items()}
        spent = best_seconds(passes)
        figures.append({name: (spent[name], meter.peak_bytes(work)) for name, work in passes.items()})
        columns.append(f"batch {size}: time, memory")
    rows = []
    for name, model in models.items():
        cells = []
        for figure in figures:
            if name == ALL:
                time_memory = zip(figure[ALL], ("{:.2f} ms", "{:.2f} MB"), (1e3, 1e-6), strict=False)
                cells.append(", ".join(form.format(value * scale) for value, form, scale in time_memory))
            else:
                shares = zip(figure.get(name, ()), figure[ALL], strict=False)
                cells.append(", ".join(f"{value / base:.0%}" for value, base in shares) or "-")
        rows.append([name, left_out(name, model), *cells])
    return f"n = {n}\n\n{meter.markdown(['network', 'rows left out', *columns], rows)}\n"


def main() -> None:
    """Print a table for every length, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/strec-efficiency"))
    parser.add_argument("--seeds", default="42", help="of weights and histories; the first counts")
    parser.add_argument("--lengths", default="50,200", help="events of a history, separated by commas")
    parser.add_argument("--batches", default="1,64,512", help="histories at a time, separated by commas")
    arguments = parser.parse_args()
    torch.manual_seed(int(arguments.seeds.split(",")[0]))
    batches = [int(size) for size in arguments.batches.split(",")]
    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads\n"
    for n in arguments.lengths.split(","):
        text += f"\n{table(int(n), batches)}"
        print(text, flush=True)
    write_text(arguments.out / "table.md", text)


if __name__ == "__main__":
    main()
