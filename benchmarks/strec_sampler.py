"""What STRec's sampler does on real histories: which events get rows, and how much its noise moves the metrics.

python benchmarks/strec_sampler.py --checkpoint artifacts/strec/finetuned --sequences data/sequences
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from seqrec.data import sequences  # noqa: E402
from seqrec.data.sequences import Sequences  # noqa: E402
from seqrec.evaluation import metrics, ranking  # noqa: E402
from seqrec.models.strec import STRec  # noqa: E402 - found through the path above
from seqrec.training.checkpoint import load_model  # noqa: E402

AGES = {
    "the same second": 0,
    "a minute": 60,
    "ten minutes": 600,
    "an hour": 3600,
    "a day": 86_400,
    "30 days": 2_592_000,
}


def with_noise_seed(model: STRec, seed: int) -> STRec:
    """Return the same weights with other draws at inference."""
    other = STRec(replace(model.options, noise_seed=seed), model.catalogue)
    other.load_state_dict(model.state_dict())
    return other.eval()


@torch.no_grad()
def accuracy(model: STRec, data: Sequences, filter_seen: bool) -> dict[str, float]:
    """Return NDCG@10 and Recall@10 of validation and test."""
    values = {}
    for split in ("valid", "test"):
        ranked = ranking.rank(ranking.model_scorer(model), data, sequences.cases(data, split), filter_seen=filter_seen)
        rank = ranked.rank if filter_seen else ranked.rank_unfiltered
        found = metrics.from_histogram(metrics.histogram(rank, data.num_items))
        values |= {f"{split} NDCG@10": found["ndcg@10"], f"{split} Recall@10": found["recall@10"]}
    return values


@torch.no_grad()
def density(model: STRec, data: Sequences) -> list[tuple[str, int, float]]:
    """Return (age up to, events, share with a row in layer 1) over the histories of the test cases."""
    chosen = sequences.cases(data, "test")
    batch = sequences.window(data, chosen.user, chosen.position, model.options.length)
    real = batch.items != 0
    computed = model._masks(batch, real, soft=False)[1].bool()
    counted = real.clone()
    counted[:, -1] = False  # the last event always has one
    age, rows = -batch.times, []
    below = torch.zeros_like(real)
    for name, limit in {**AGES, "longer": float("inf")}.items():
        within: Tensor = (age <= limit) & ~below & counted
        below = below | (age <= limit)
        rows.append((name, int(within.sum()), float(computed[within].float().mean())))
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a trained STRec")
    parser.add_argument("--sequences", type=Path, required=True, help="folder of the prepared dataset")
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    model, card = load_model(arguments.checkpoint)
    assert isinstance(model, STRec), "the checkpoint holds another model"
    data = sequences.load(arguments.sequences)

    print("| age of the event, up to | events | share with a row in layer 1 |\n|---|---|---|")
    for name, events, share in density(model, data):
        print(f"| {name} | {events:,} | {share:.1%} |")

    draws = [accuracy(with_noise_seed(model, seed), data, bool(card["filter_seen"])) for seed in range(arguments.draws)]
    print(f"\n| metric | mean over {len(draws)} draws of the noise | standard deviation |\n|---|---|---|")
    for name in draws[0]:
        values = [draw[name] for draw in draws]
        print(f"| {name} | {statistics.mean(values):.4f} | {statistics.stdev(values):.4f} |")


if __name__ == "__main__":
    main()
