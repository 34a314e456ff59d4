"""Speed, memory, quality and waits for the device on one GPU.

    python -m benchmarks.gpu --sequences data/sequences --out gpu.jsonl

Each part has a share of `--minutes`. A row that fails, or has no time left, says so, and the others go on.
`--device cpu --quick` runs everything at tiny sizes to test the script; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks import flops, meter, peers
from seqrec import config
from seqrec.config import FinetuneConfig, Params
from seqrec.data import sequences
from seqrec.evaluation import ranking
from seqrec.evaluation.metrics import SELECTION
from seqrec.models import Catalogue, SequenceModel
from seqrec.models.text_encoder import Encoder, Text, TextEncoderOptions
from seqrec.training import auto_settings, batches, checkpoint, cost, loop, losses, resume, utilisation

MODELS = ("sasrec", "flash4rec")  # entries of --config-file
PRECISIONS = ("fp32", "bf16")
SETTINGS = peers.ROOT / "configs" / "ml-1m" / "flash4rec.yaml"
TARGETS, WIDTH = 4096, 64  # of the losses, as in the table of the CPU
BERT = {"d_model": 768, "d_inner": 3072, "layers": 12, "heads": 12, "max_tokens": 512}
TINY = {"d_model": 16, "d_inner": 32, "layers": 2, "heads": 2, "max_tokens": 130}
LIGER, CUT = "liger_kernel.transformers", "cut_cross_entropy"  # the second reads no fp32
Figures = dict[str, Any]  # numbers or text, by head of the column
LOSSES: dict[str, Callable[..., Tensor]] = {  # queries (N, D), item vectors (V, D), targets (N,) -> mean loss
    "ours": lambda q, v, t: losses.cross_entropy(q, v, t).mean(),
    "ours with TF32": lambda q, v, t: losses.cross_entropy(q, v, t, precision="bf16").mean(),
    "all logits": lambda q, v, t: F.cross_entropy(q @ v[1:].T, t - 1),
    "torch": lambda q, v, t: F.linear_cross_entropy(q, v[1:], t - 1, options=torch.nn.LinearCrossEntropyOptions()),
    "Liger Kernel": lambda q, v, t: import_module(LIGER).LigerFusedLinearCrossEntropyLoss()(v[1:], q, t - 1),
    "cut-cross-entropy": lambda q, v, t: import_module(CUT).linear_cross_entropy(q.bfloat16(), v[1:].bfloat16(), t - 1),
}


class Enough(Exception):  # noqa: N818
    """Ends a training."""


@dataclass
class Run:
    """What the parts share."""

    device: torch.device
    quick: bool
    goals: Sequence[float]  # NDCG@10
    data: sequences.Sequences  # on the host
    params: Params
    peak: float  # FLOP per second of a bf16 matrix product
    deadline: float  # of the current part, as `time.monotonic`

    def start(self, name: str, **changes: Any) -> tuple[SequenceModel, FinetuneConfig]:
        """Return the model `name` of the settings, and its training settings with `changes`."""
        torch.manual_seed(0)
        shape = auto_settings.Shape.of(self.data)
        architecture = auto_settings.resolved_options(self.params.model(name), shape, name)
        model = checkpoint.build(architecture, Catalogue(self.data.num_items, self.data.num_users, 0))
        section, options = self.params.section("finetune", model=name), architecture.options
        config = auto_settings.resolved(section, shape, architecture.architecture, options)
        return model, replace(config, **changes)

    def train(
        self, model: SequenceModel, config: FinetuneConfig, enough: Callable[[Figures], object], epochs: int = 0
    ) -> list[Figures]:
        """Train until the record of an epoch is `enough` or time is up; with `epochs`, so many without validation."""
        records: list[Figures] = []

        def log(record: Figures, _: int) -> None:
            records.append(record)
            if enough(record) or time.monotonic() > self.deadline:
                raise Enough

        with tempfile.TemporaryDirectory() as folder, suppress(Enough):
            state, accelerator = resume.ResumeState(Path(folder), "gpu"), Accelerator(cpu=self.device.type == "cpu")
            common = {"stage": "finetune", "filter_seen": True, "epochs": {"train": epochs} if epochs else None}
            loop.fit(model, self.data, config=config, state=state, accelerator=accelerator, log=log, **common)
        return records

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the median seconds of a call, after a first one."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        seconds: list[float] = []
        work()
        while not seconds or (sum(seconds) < 2 and len(seconds) < 50 and not self.quick):
            wait()
            began = time.perf_counter()
            work()
            wait()
            seconds.append(time.perf_counter() - began)
        return median(seconds)


def training(run: Run, name: str, size: int, precision: str) -> Figures:
    """Train for three epochs; the speed is the better one of the last two."""
    model, config = run.start(name, batch_size=size, precision=precision)
    width = batches.windows(run.data, model.options, config, torch.Generator()).width  # every position has a target
    needed = flops.training_flops(type(model), run.data.num_items, width.tolist(), model.options) / int(width.sum())
    records = run.train(model, config, lambda _: False, epochs=3)
    speed = max(record["targets_per_second"] for record in records[1:] or records)
    return {"targets/s": speed, "of the peak": speed * needed / run.peak, "MFLOP a target": needed / 1e6}


def time_to_quality(run: Run, name: str) -> Figures:
    """Train with the settings of the file; the seconds are those of training."""
    began = time.monotonic()
    model, config = run.start(name, **({"epochs": 2} if run.quick else {}))
    records = run.train(model, config, lambda record: record.get(SELECTION, 0) >= max(run.goals))
    ends, measured = accumulate(r["seconds"] for r in records), [r.get(SELECTION) for r in records]
    reached = [(end, ndcg) for end, ndcg in zip(ends, measured, strict=True) if ndcg is not None]
    times = {f"s to {goal}": next((s for s, found in reached if found >= goal), "not reached") for goal in run.goals}
    best = max((ndcg for _, ndcg in reached), default=0.0)
    return times | {"best NDCG@10": best, "epochs": len(records), "s with validation": time.monotonic() - began}


def encoder(run: Run, output: str, precision: str) -> Figures:
    """Forward and backward pass over a batch of full texts."""
    rows, words = (2, 100) if run.quick else (80, 30_522)
    options = TextEncoderOptions(**(TINY if run.quick else BERT))
    torch.manual_seed(0)
    net, shape = Encoder(options, words).to(run.device), (rows, options.max_tokens)
    ids = [torch.randint(limit, shape, device=run.device) for limit in (words, 4, options.length + 1)]
    text = Text(*ids, *torch.ones((2, *shape), dtype=torch.bool, device=run.device))

    def step(text: Text) -> None:
        net.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16, enabled=precision == "bf16"):
            out = net(text, only_first=output == "[CLS]")
        out.float().square().mean().backward()

    needed = rows * flops.counted(partial(step, Text(*(values[:1] for values in text))))
    rate = 1 / run.seconds_of(partial(step, text))
    return {"steps/s": rate, "tokens/s": rate * text.ids_BT.numel(), "of the peak": rate * needed / run.peak}


def users(run: Run, name: str) -> Figures:
    """Rank the test cases: ten unseen items, and the target's exact ranks."""
    model, data = run.start(name)[0].to(run.device).eval(), run.data.to(run.device)
    cases = sequences.cases(data, "test")
    work = partial(ranking.rank, ranking.model_scorer(model), data, cases, filter_seen=True, top_k=10)
    return {"users/s": len(cases) / run.seconds_of(work)}


def softmax(run: Run, items: int, name: str) -> Figures:
    """Forward and backward pass of a loss."""
    torch.manual_seed(0)
    item_VD = torch.randn(items + 1, WIDTH, device=run.device).mul_(0.02).requires_grad_()
    query_ND = torch.randn(TARGETS, WIDTH, device=run.device).requires_grad_()
    target_N = torch.randint(1, items + 1, (TARGETS,), device=run.device)

    def step() -> None:
        item_VD.grad = query_ND.grad = None
        LOSSES[name](query_ND, item_VD, target_N).backward()

    return {"ms": 1e3 * run.seconds_of(step)}


def waits(run: Run, name: str, precision: str) -> Figures:
    """Count the waits for the device in the second epoch, from its plan to its record."""
    model, config = run.start(name, precision=precision)
    debug = torch.cuda.set_sync_debug_mode if run.device.type == "cuda" else lambda _: None
    model.on_epoch = partial(debug, "warn")  # the engine calls it at the start of each epoch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def end(record: Figures) -> None:
            debug("default")
            if record["epoch"] == 1:
                caught.clear()

        records = run.train(model, config, end, epochs=2)
    if len(records) < 2:
        raise TimeoutError("no time left for a second epoch")
    return waits_of(caught, steps=records[-1]["step"] // len(records))


def waits_of(caught: Iterable[warnings.WarningMessage], steps: int) -> Figures:
    """Return how many of the warnings of `steps` steps report a wait, and the lines that they name."""
    found = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    lines = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in found).most_common(12)
    listed = ", ".join(f"{line} ({number})" for line, number in lines)
    return {"steps": steps, "waits": len(found), "waits a step": len(found) / steps, "lines (waits)": listed or "none"}


def parts(quick: bool) -> dict[str, tuple[Callable[..., Figures], float, list[tuple[Any, ...]]]]:
    """Return, for each part, what measures a row, the share of the time, and the rows."""
    sizes, items = ((8,), (100,)) if quick else ((128, 1024), (10**4, 10**5, 10**6))
    return {
        "training": (training, 0.25, list(product(MODELS, sizes, PRECISIONS))),
        "time to quality": (time_to_quality, 0.35, [(name,) for name in MODELS]),
        "text encoder": (encoder, 0.1, list(product(("[CLS]", "all tokens"), PRECISIONS))),
        "ranking": (users, 0.05, [(name,) for name in MODELS]),
        "full softmax": (softmax, 0.1, list(product(items, LOSSES))),
        "waits": (waits, 0.1, list(product(MODELS, PRECISIONS))),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts; print a table for each."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=Path, required=True, help="folder of prepared sequences (LOO-full)")
    parser.add_argument("--config-file", type=Path, default=SETTINGS, help=f"settings of {' and '.join(MODELS)}")
    parser.add_argument("--changes", default="", help='settings to change, such as "finetune.batch_size=256"')
    parser.add_argument("--goals", type=float, nargs="+", default=[0.157, 0.2], help="NDCG@10 on validation")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--parts", nargs="+", choices=parts(True), default=list(parts(True)))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--out", type=Path, help="file to which each row is added as a line of JSON")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    peak, data = utilisation.matmul_peak(device, "bf16"), sequences.load(options.sequences)
    params = config.load(options.config_file).with_overrides(config.read_changes(options.changes))
    run = Run(device, options.quick, options.goals, data, params, peak, began)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    print(f"{gpu}, {meter.machine(torch.get_num_threads())}. A bf16 matrix product: {peak / 1e12:,.2f} TFLOP/s.")
    for part, (measure, share, rows) in parts(options.quick).items():
        if part not in options.parts:
            continue
        run.deadline += 60 * options.minutes * share
        found = {}
        for row in rows:
            name = ", ".join(f"{x:,}" if isinstance(x, int) else x for x in row)
            found[name] = guarded(run, partial(measure, run, *row))
            line = json.dumps({"part": part, "row": name, "peak": peak, **found[name]})
            print(line, file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(f"{line}\n")
        print(f"\n{table(part, found)}", flush=True)


def guarded(run: Run, measure: Callable[[], Figures]) -> Figures:
    """Return the figures of a row and the peak memory in MiB, or why there are none."""
    if time.monotonic() > run.deadline:
        return {"failed": "no time left"}
    try:
        if run.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")  # should an earlier row have failed
            torch.cuda.reset_peak_memory_stats()
        return measure() | {"peak MiB": cost.peak_memory(run.device) / 2**20}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:150].replace("|", "/")}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def table(part: str, rows: dict[str, Figures]) -> str:
    """Return the Markdown table of a part."""
    heads = sorted(dict.fromkeys(head for figures in rows.values() for head in figures), key=lambda h: h == "failed")

    def cell(value: Any) -> str:
        return value if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.4g}"

    return meter.markdown(
        (part, *heads), [[name, *(cell(row.get(h, "")) for h in heads)] for name, row in rows.items()]
    )


if __name__ == "__main__":
    main()
