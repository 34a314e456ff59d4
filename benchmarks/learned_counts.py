"""Counts added after training against counts in the loss.

    python -m benchmarks.learned_counts --dataset ml-100k --data FOLDER --out FOLDER

With counts in the loss, SASRec is trained on the sum of its scores and `alpha` times the count term, so that it learns
what the counts do not say; validation during training scores the sum as well. The pair of events to predict is taken
out of its own count. alpha 0 is the default: the model is trained alone. In both cases the usual search chooses the
values of the term on validation after training. The data folder has `sequences` in it, of at most 4,095 items.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.meter import markdown
from seqrec.artifacts import read_json
from seqrec.commands import run
from seqrec.config import CountsConfig, Params, TrainConfig, from_dict, load
from seqrec.counts.table import count
from seqrec.counts.term import build, kernel, with_counts
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation import ranking
from seqrec.training import loop, validation
from seqrec.training.losses import Past
from seqrec.training.objectives import Loss

ROOT = Path(__file__).resolve().parents[1]
MODEL, TAU = "sasrec", 1000.0


class Prior:
    """The count term as a part of a training loss, with a dense table."""

    def __init__(self, data: Sequences, alpha: float) -> None:
        self.config = CountsConfig(alpha=alpha, kernel="inverse", window=10, smoothing=TAU / data.num_items, rho=0.65)
        self.gamma_J = F.pad(kernel("inverse", 10).float(), (0, max(0, self.config.events - 10)))[: self.config.events]
        self.weight_J = kernel(str(self.config.rho), self.config.events).float()
        table = count(data, kernel("inverse", 10).tolist(), data.num_items)
        size = len(data.count)
        row = torch.repeat_interleave(torch.arange(size), table.offsets.diff())
        self.count_VV = torch.zeros(size, size)
        self.count_VV[row, table.targets.long()] = table.values
        self.value_VV = torch.log1p(self.count_VV / self.config.smoothing)

    def __call__(self, past: Past, target_N: Tensor) -> Tensor:
        """Return the term (N, V); at the target, the event to predict has not been counted."""
        column_NJ = past.stop_N.unsqueeze(1) - 1 - torch.arange(len(self.weight_J))
        items_NJ = past.items_BL[past.row_N.unsqueeze(1), column_NJ.clamp(min=0)].masked_fill(column_NJ < 0, 0)
        weight_NJ = self.weight_J * (items_NJ > 0)
        weight_NJ = weight_NJ / weight_NJ.sum(1, keepdim=True).clamp(min=1e-9)
        term_NV = F.embedding_bag(items_NJ, self.value_VV, per_sample_weights=weight_NJ, mode="sum")
        others_NJ = (self.count_VV[items_NJ, target_N.unsqueeze(1)] - self.gamma_J).clamp(min=0)
        at_target_N = (weight_NJ * torch.log1p(others_NJ / self.config.smoothing)).sum(1)
        return self.config.alpha * term_NV.scatter(1, target_N.unsqueeze(1), at_target_N.unsqueeze(1))


class LossOfSum(Loss):
    """Cross-entropy of the model's scores plus the term."""

    def __init__(self, config: TrainConfig, count_V: Tensor, *, prior: Prior) -> None:
        super().__init__(config, count_V)
        self.prior = prior

    def __call__(self, query_ND: Tensor, item_VD: Tensor, target_N: Tensor, past: Past | None = None) -> Tensor:
        """Return the loss of each target (N,)."""
        assert past is not None
        logits_NV = query_ND @ item_VD.T + self.prior(past, target_N)
        return F.cross_entropy(logits_NV[:, 1:], target_N - 1, reduction="none")


@contextmanager
def trained_on_the_sum(data: Sequences, alpha: float) -> Iterator[None]:
    """Train on the sum within this context, and validate on it."""
    prior = Prior(data, alpha)
    term, scorer, validate = build(data, prior.config), ranking.model_scorer, validation.validate

    def validate_sum(*arguments: Any, **settings: Any) -> dict[str, float]:
        with patch.object(ranking, "model_scorer", lambda *given: with_counts(scorer(*given), term)):
            return validate(*arguments, **settings)

    with (
        patch.object(loop, "Loss", partial(LossOfSum, prior=prior)),
        patch.object(validation, "validate", validate_sum),
    ):
        yield


def settings(dataset: str, seed: int, alpha: float) -> Params:
    """Return params.yaml with one model, whose loss is handed the past of each query where alpha is above 0."""
    base = load(ROOT / "params.yaml").as_dict()
    base |= {"dataset": dataset, "datasets": {dataset: base["datasets"].get(dataset, {})}, "sources": [], "tune": {}}
    base |= {"seed": seed, "leaderboard": [MODEL], "models": {MODEL: base["models"][MODEL]}}
    base["finetune"]["exclude_past"] = alpha > 0
    return from_dict(base)


def main() -> None:
    """Train what is missing below `--out` and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", required=True, help="its key in params.yaml, or any name: settings by rule alone")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    flags = parser.parse_args()
    data = sequences.load(flags.data / "sequences")
    rows = []
    for alpha in flags.alphas:
        for seed in flags.seeds:
            params, out = settings(flags.dataset, seed, alpha), flags.out / f"alpha-{alpha:g}-seed-{seed}"
            with trained_on_the_sum(data, alpha) if alpha else nullcontext():
                run.train_model(params, MODEL, flags.data / "sequences", out, resume=False)
            values = read_json(out / "reports" / MODEL / "metrics.json")
            rows.append((f"{alpha:g}", seed, f"{values['valid/ndcg@10']:.4f}", f"{values['test/ndcg@10']:.4f}"))
    print(markdown(("alpha in the loss", "seed", "valid/ndcg@10", "test/ndcg@10"), rows))


if __name__ == "__main__":
    main()
