"""Run the experiments of configs/rec-denoiser, and write their tables and figures: `make experiments`.

  python scripts/rec_denoiser_experiments.py --only ml-100k-noise-05

Every model of every config is a `seqrec run` of its own below --out. One that has its metrics is skipped, and one that
was interrupted continues where its resume state stands: the same command finishes the work. The tables and figures of
docs/results/rec-denoiser.md show what there is so far.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from matplotlib.figure import Figure
from torch import Tensor, nn

from seqrec.artifacts import CASES, METRICS, SPLIT_CARD, read_json, write_text
from seqrec.commands.run import run
from seqrec.config import Params, load
from seqrec.data import sequences
from seqrec.evaluation import intervals
from seqrec.models.rec_denoiser import BACKBONES, RecDenoiser
from seqrec.stages.evaluate import evaluate
from seqrec.stages.ingest import ingest
from seqrec.stages.prepare import prepare
from seqrec.stages.validate import validate
from seqrec.training.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "rec-denoiser"
DOCUMENT = ROOT / "docs" / "results" / "rec-denoiser.md"
IMAGES = ROOT / "docs" / "images"
VARIANT = re.compile("-(both|mask|jacobian|strided|entmax)")  # in a model's name; without it, the name of its backbone
USERS_DRAWN = 200  # of a heat map
FAR = 1000
BANDS = ((0, 1), (1, 2), (2, 4), (4, 16), (16, FAR))  # distances of a query and a key, first and one past the last
logger = logging.getLogger("experiments")


def main() -> None:
    """Run what is missing, then write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of configs; all of them if left out")
    parser.add_argument("--out", type=Path, default=Path("runs/rec-denoiser"))
    parser.add_argument("--evaluate", action="store_true", help="evaluate what is finished once more; train nothing")
    parser.add_argument("--tables", action="store_true", help="write tables and figures; run nothing")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    paths = sorted(CONFIGS.glob("*.yaml"))
    if unknown := set(flags.only) - {path.stem for path in paths}:
        parser.error(
            f"--only: no {', '.join(sorted(unknown))} in {CONFIGS}; there are {', '.join(p.stem for p in paths)}"
        )
    for path in paths:
        if flags.tables or (flags.only and path.stem not in flags.only):
            continue
        params = load(path)
        for model in params.leaderboard:
            experiment = Experiment(flags.out, path.stem, model)
            if flags.evaluate:
                again(experiment, params)
            elif not experiment.finished:
                logger.info("%s of %s", model, path.stem)
                train(experiment, path, params)
    write_document(flags.out)


@dataclass(frozen=True)
class Experiment:
    """A model of a config, and where its results lie."""

    out: Path
    config: str
    model: str

    @property
    def folder(self) -> Path:
        """What `seqrec run` writes to."""
        return self.out / self.config / self.model

    @property
    def report(self) -> Path:
        """Metrics and cases."""
        return self.folder / "reports" / self.model

    @property
    def checkpoint(self) -> Path:
        """The trained weights."""
        return self.folder / "artifacts" / self.model / "finetuned"

    @property
    def finished(self) -> bool:
        """Whether it was trained and evaluated."""
        return (self.report / METRICS).is_file()

    @property
    def backbone(self) -> Experiment:
        """The same model without what Rec-Denoiser adds; of a config without one, that of ml-100k."""
        name = VARIANT.sub("", self.model)
        own = name.startswith(tuple(BACKBONES))
        return Experiment(self.out, self.config, name) if own else Experiment(self.out, "ml-100k", "sasrec")

    def value(self, name: str) -> float:
        """Return a metric of the test split."""
        return float(read_json(self.report / METRICS)[f"test/{name}"])


def train(experiment: Experiment, path: Path, params: Params) -> None:
    """Train and evaluate one model of the config at `path`."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) | {"leaderboard": [experiment.model]}
    narrowed = experiment.out / experiment.config / f"{experiment.model}.yaml"
    write_text(narrowed, yaml.safe_dump(content, sort_keys=False))
    run(config_file=narrowed, out=experiment.folder, data=data_of(params, experiment.out))


def again(experiment: Experiment, params: Params) -> None:
    """Evaluate a finished model once more."""
    if experiment.finished:
        evaluate(
            model=experiment.model,
            sequences=data_of(params, experiment.out) / "sequences",
            checkpoint=experiment.checkpoint,
            report=experiment.report,
            config=params.section("evaluate"),
        )


def data_of(params: Params, out: Path) -> Path:
    """Return the folder of the prepared data, made if it is not there; configs share it."""
    section = params.section("prepare")
    raw, verdict = out / "data" / params.dataset, out / "data" / params.dataset / "validation.json"
    if not verdict.is_file():
        ingest(dataset=params.dataset, output=raw, downloads=raw / "downloads", config=params.section("ingest"))
        validate(
            dataset=params.dataset,
            data=raw,
            report=verdict,
            baseline=ROOT / "configs" / "baseline.json",
            config=params.section("validate"),
        )
    folder = raw / f"{section.protocol}-noise-{section.noise_share}"
    if not (folder / "sequences" / SPLIT_CARD).is_file():
        prepare(dataset=params.dataset, data=raw, validation=verdict, sequences=folder / "sequences", config=section)
    return folder


def experiments(out: Path, config: str) -> list[Experiment]:
    """Return the finished models of a config, in its order."""
    params = load(CONFIGS / f"{config}.yaml")
    return [found for name in params.leaderboard if (found := Experiment(out, config, name)).finished]


def write_document(out: Path) -> None:
    """Put tables between the marks of the document, and figures beside it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = {path.stem: table(out, path.stem) for path in sorted(CONFIGS.glob("*.yaml"))} | {"masks": mask_table(out)}
    for name, content in tables.items():
        pattern = re.compile(f"(<!-- table {name} -->).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda match, content=content: f"{match[1]}\n{content}\n{match[2]}", text)
    write_text(DOCUMENT, text)
    noise_figure(out)
    grid_figure(out)
    attention_figure(out)


def table(out: Path, config: str) -> str:
    """Return the results of a config as a markdown table."""
    found = experiments(out, config)
    if not found:
        return "not run"
    head = "| model | NDCG@10 | HR@10 | NDCG@10 of 101 | HR@10 of 101 | gain of NDCG@10 [95 %] | masked | training |"
    lines = [head, "|" + "---|" * 8]
    for experiment in found:
        values = [f"{experiment.value(name):.4f}" for name in ("ndcg@10", "recall@10", "101/ndcg@10", "101/recall@10")]
        seconds = read_json(experiment.report / METRICS)["train_seconds"]
        values += [gain(experiment), sparsity(experiment), f"{seconds:.0f} s"]
        lines.append(f"| {experiment.model} | {' | '.join(values)} |")
    return "\n".join(lines)


def gain(experiment: Experiment) -> str:
    """Return the paired gain over the backbone, relative and in points with its interval over users."""
    base = experiment.backbone
    if base == experiment or not base.finished:
        return "-"
    cases, other = (pq.read_table(each.report / CASES) for each in (experiment, base))
    interval = intervals.paired_gain(cases, other, split="test", seed=42)
    relative = interval.mean / base.value("ndcg@10")
    return f"{relative:+.1%}: {interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def sparsity(experiment: Experiment) -> str:
    """Return the share of valid mask entries of a full window that are zero at test."""
    model = masked(experiment)
    return f"{model.sparsity(torch.ones(1, model.options.length, dtype=torch.int64)):.1%}" if model else "-"


def masked(experiment: Experiment) -> RecDenoiser | None:
    """Return the trained model, if it has masks."""
    model = load_checkpoint(experiment.checkpoint).model
    return model if isinstance(model, RecDenoiser) and model.masks else None


@torch.no_grad()
def mask_table(out: Path) -> str:
    """Return how far each layer of SASRec's masks has moved from its start, by distance, as a markdown table.

    In brackets is the number of standard errors that the mean would have, were the entries independent.
    """
    labels = [
        f"{low}" if high == low + 1 else f"{low} on" if high == FAR else f"{low} to {high - 1}" for low, high in BANDS
    ]
    head = ["model, layer", "standard deviation", "masked", *(f"distance {label}" for label in labels)]
    lines = [head, ["---"] * len(head)]
    for config in ("ml-100k", "ml-100k-estimators", "ml-1m"):
        for experiment in experiments(out, config):
            model = masked(experiment)
            if model is None or model.options.backbone != "sasrec":
                continue
            place = torch.arange(model.options.length)
            distance_LL = place[:, None] - place
            for layer, mask in enumerate(model.masks, start=1):
                moved_XLL = mask.logits(len(place)) - math.log(model.options.keep / (1 - model.options.keep))
                zero_XLL = mask.at_test(len(place)) == 0
                bands = [moved_XLL[:, (distance_LL >= low) & (distance_LL < high)].flatten() for low, high in BANDS]
                errors = [float(band.mean() / band.std() * len(band) ** 0.5) for band in bands]
                cells = [f"{band.mean():+.2f} ({error:+.0f})" for band, error in zip(bands, errors, strict=True)]
                valid = distance_LL >= 0
                spread, share = moved_XLL[:, valid].std(), zero_XLL[:, valid].float().mean()
                lines.append([f"{config}: {experiment.model}, {layer}", f"{spread:.2f}", f"{share:.1%}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(lines) > 2 else "not run"


def noise_figure(out: Path) -> None:
    """NDCG@10 against the share of noise, a line a kind of attention (the paper's Fig. 3)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for share, config in [(0, "ml-100k")] + [(n, f"ml-100k-noise-{n:02}") for n in (5, 10, 15, 20, 25)]:
        for experiment in experiments(out, config):
            if experiment.model in ("sasrec", "sasrec-both", "sasrec-strided", "sasrec-entmax"):
                lines.setdefault(experiment.model, []).append((share, experiment.value("ndcg@10")))
    _draw_lines("rec-denoiser-noise", lines, "training items replaced, %", log=False)


def grid_figure(out: Path) -> None:
    """NDCG@10 against the weight of each penalty, the other at its default (the paper's Fig. 5)."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for experiment in experiments(out, "ml-100k-grid"):
        name, _, weight = experiment.model.partition("-")
        lines.setdefault(name, []).append((float(weight), experiment.value("ndcg@10")))
        if experiment.model == "beta-0.01":  # the default of both
            lines.setdefault("gamma", []).append((0.0001, experiment.value("ndcg@10")))
    _draw_lines("rec-denoiser-grid", {name: sorted(points) for name, points in lines.items()}, "weight", log=True)


def _draw_lines(name: str, lines: dict[str, list[tuple[float, float]]], label: str, *, log: bool) -> None:
    if not lines:
        return
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axis = figure.subplots()
    for line, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=line)
    axis.set(xlabel=label, ylabel="test/ndcg@10", xscale="log" if log else "linear")
    axis.legend(fontsize="small")
    figure.savefig(IMAGES / f"{name}.png", dpi=100)


class Averaged(nn.Module):
    """Attention whose weights are averaged over examples and heads while they are used."""

    def __init__(self, weigh: nn.Module) -> None:
        super().__init__()
        self.weigh = weigh
        self.mean_QL = torch.zeros(0)

    def forward(self, score_BHQL: Tensor) -> Tensor:
        """Return the weights."""
        weight: Tensor = self.weigh(score_BHQL)
        self.mean_QL = weight.mean((0, 1))
        return weight


@torch.no_grad()
def attention_of(experiment: Experiment, data: sequences.Sequences) -> list[np.ndarray]:
    """Return each layer's mean weights (L, L) over users with a full window."""
    model = load_checkpoint(experiment.checkpoint).model
    for block in model.blocks:  # type: ignore[union-attr]
        block.attention.weigh = Averaged(block.attention.weigh or nn.Softmax(-1))
    length = model.options.length
    users = torch.nonzero(data.valid_stop - data.start >= length).squeeze(1)[:USERS_DRAWN]
    model(sequences.window(data, users, data.valid_stop[users], length))
    return [block.attention.weigh.mean_QL.numpy() for block in model.blocks]  # type: ignore[union-attr]


def attention_figure(out: Path) -> None:
    """Mean attention of the plain backbone and with masks (the paper's Fig. 2)."""
    pair = [Experiment(out, "ml-100k", name) for name in ("sasrec", "sasrec-both")]
    if not all(experiment.finished for experiment in pair):
        return
    data = sequences.load(data_of(load(CONFIGS / "ml-100k.yaml"), out) / "sequences")
    weights = {experiment.model: attention_of(experiment, data) for experiment in pair}
    figure = Figure(figsize=(8.0, 7.5), layout="constrained")
    panels = figure.subplots(2, len(weights["sasrec"]), squeeze=False)
    for row, (name, layers) in zip(panels, weights.items(), strict=True):
        for axis, (number, layer_QL) in zip(row, enumerate(layers, start=1), strict=True):
            image = axis.imshow(np.log10(layer_QL + 1e-5), vmin=-4, vmax=0)
            axis.set(title=f"{name}, layer {number}", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=panels, shrink=0.6, label="log10 of the mean weight")
    figure.savefig(IMAGES / "rec-denoiser-attention.png", dpi=80)


if __name__ == "__main__":
    main()
