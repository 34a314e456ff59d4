"""Does Rec-Denoiser beat its backbone? Trains the rows of a config, and compares them with their backbones.

The rows of the config are named after their backbone, the part before the hyphen, and are compared with it. Those of
configs/rec-denoiser/twins.yaml, the default, have the loss of the paper, and those of softmax.yaml full softmax. Rows
with masks are ranked a second time after the entries of each row of their masks were shuffled among the keys that the
row may read: if that is as good, what the masks learnt is worth nothing. An interrupted run continues if it is started
again.

    python scripts/rec_denoiser_twins.py --out runs/rec-denoiser-twins --seeds 42,43,44
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seqrec.artifacts import write_text
from seqrec.commands.benchmark import benchmark, gains, is_finished
from seqrec.commands.settings import without_unfed
from seqrec.config import Params, load
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.evaluation.metrics import FloatArray
from seqrec.models.base import SequenceModel
from seqrec.models.rec_denoiser import RecDenoiser
from seqrec.training.checkpoint import load_checkpoint

CONFIG = Path(__file__).parent.parent / "configs/rec-denoiser/twins.yaml"
SHUFFLED = ", shuffled"
Ranks = tuple[FloatArray, FloatArray]  # of each test case: among 101 items, and among the whole catalogue


class Row(NamedTuple):
    """What a row of the config reached, by seed."""

    ranks: dict[int, Ranks]
    valid: float = float("nan")  # mean validation NDCG@10, whole catalogue
    dropped: float = float("nan")  # mean share of mask entries that a training draw drops at the end
    masked: float = float("nan")  # mean share of them that are zero at test
    seconds: float = float("nan")  # mean time of training


@torch.no_grad()
def shuffle(model: RecDenoiser, seed: int) -> None:
    """Permute the entries of each row of the masks among the keys that the row may read."""
    generator = torch.Generator().manual_seed(seed)
    for mask in model.masks:
        for raw_LL in mask.raw_XLL:
            for query, raw_L in enumerate(raw_LL):
                keys = len(raw_L) if model.options.masked else query + 1
                raw_L[:keys] = raw_L[torch.randperm(keys, generator=generator)]


@torch.no_grad()
def dropped(model: RecDenoiser) -> float:
    """Return the share of valid mask entries that a draw is expected to drop, in a full window."""
    length = model.options.length
    valid_LL = model.valid(torch.ones(1, length, dtype=torch.long))[0]
    return float(np.mean([float(1 - mask.logits(length).sigmoid()[:, valid_LL].mean()) for mask in model.masks]))


def rank(model: SequenceModel, data: Sequences, split: str = "test") -> Ranks:
    """Return the ranks of the cases of `split`, seen items filtered."""
    ranked = ranking.rank(ranking.model_scorer(model), data, sequences.cases(data, split), filter_seen=True)
    return ranked.rank_sampled.numpy(), ranked.rank.numpy()


def read(out: Path, params: Params, seeds: list[int]) -> tuple[Sequences, dict[str, Row]]:
    """Return the dataset, and every row that is finished for some of the seeds, with its shuffled copy."""
    folder = out / "data/sequences"
    data = sequences.load(folder)
    found: dict[str, Row] = {}
    for name in params.leaderboard:
        ranks, shuffled, valid, shares, seconds = {}, {}, [], [], []
        for seed in seeds:
            if not is_finished(out / f"seed-{seed}/reports" / name, params, name, folder, seed):
                continue
            trained = load_checkpoint(out / f"seed-{seed}/artifacts" / name / "finetuned")
            model = trained.model.eval()
            seconds.append(trained.card["seconds"])
            ranks[seed] = rank(model, data)
            valid.append(metrics.ndcg(rank(model, data, "valid")[1], 10).mean())
            if isinstance(model, RecDenoiser) and model.masks:
                full_BL = torch.ones(1, model.options.length, dtype=torch.long)
                shares.append((dropped(model), model.sparsity(full_BL)))
                shuffle(model, seed)
                shuffled[seed] = rank(model, data)
        if not ranks:
            continue
        drawn, masked = map(float, np.mean(shares or [(np.nan, np.nan)], axis=0))
        found[name] = Row(ranks, float(np.mean(valid)), drawn, masked, float(np.mean(seconds)))
        if shuffled:
            found[name + SHUFFLED] = Row(shuffled)
    return data, found


def table(user: NDArray[np.integer], rows: dict[str, Row]) -> str:
    """Return the rows as Markdown, given the user of each case; p-values are corrected within each backbone."""
    found: dict[tuple[str, int], str] = {}
    for base in (name for name in rows if "-" not in name):
        twins = [name for name in rows if name.startswith(f"{base}-") and rows[name].ranks.keys() & rows[base].ranks]
        for among in (0, 1):
            differences = [_difference(rows[name], rows[base], among) for name in twins]
            for name, (gain, p_value) in zip(twins, gains(user, differences), strict=True):
                found[name, among] = f"{gain}, {p_value:.3f}"
    headings = ["row", "seeds", "validation NDCG@10"]
    for candidates in ("of 101", "whole catalogue"):
        headings += [f"{candidates}: NDCG@10", "HR@10", "gain in NDCG@10 [95 %], p (Holm)"]
    headings += ["dropped in training", "masked at test", "training"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [_line(name, row, [found.get((name, among), "-") for among in (0, 1)]) for name, row in rows.items()]
    return "\n".join([*lines, ""])


def _difference(row: Row, base: Row, among: int) -> FloatArray:
    """Return the gains (S, C) in NDCG@10 with the seeds of both rows."""
    pairs = [(row.ranks[seed][among], base.ranks[seed][among]) for seed in row.ranks if seed in base.ranks]
    return np.stack([metrics.ndcg(ours, 10) - metrics.ndcg(theirs, 10) for ours, theirs in pairs])


def _line(name: str, row: Row, gains: list[str]) -> str:
    cells = [name, ", ".join(map(str, row.ranks)), _shown(row.valid, ".4f")]
    for among, gain in enumerate(gains):
        by_seed = [ranks[among] for ranks in row.ranks.values()]
        ndcg = [metrics.ndcg(values, 10).mean() for values in by_seed]
        spread = f" ± {np.std(ndcg, ddof=1):.4f}" if len(ndcg) > 1 else ""
        hits = np.mean([values <= 10 for values in by_seed])
        cells += [f"{np.mean(ndcg):.4f}{spread}", f"{hits:.4f}", gain]
    cells += [_shown(row.dropped, ".1%"), _shown(row.masked, ".1%"), _shown(row.seconds, ".0f")]
    return f"| {' | '.join(cells)} |"


def _shown(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def main() -> None:
    """Train what is missing, write the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", type=Path, default=CONFIG)
    parser.add_argument("--dataset", default="", help="key in `datasets`; default: `dataset` in the config")
    parser.add_argument("--out", type=Path, help="default: runs/rec-denoiser-CONFIG-DATASET")
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument(
        "--only", default="", help="rows to train, separated by commas; the table has all finished rows"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("seqrec").setLevel(logging.INFO)
    config, dataset = arguments.config_file, arguments.dataset
    out = arguments.out or Path("runs") / "-".join(filter(None, ("rec-denoiser", config.stem, dataset)))
    benchmark(config_file=config, out=out, dataset=dataset, seeds=arguments.seeds, only=arguments.only)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    params = load(config)
    data, rows = read(out, without_unfed(replace(params, dataset=dataset or params.dataset)), seeds)
    user = sequences.cases(data, "test").user.numpy()
    text = f"{data.card['dataset']}, split {data.card['split_sha256'][:12]}\n\n{table(user, rows)}"
    write_text(out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
