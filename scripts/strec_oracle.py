"""Which events of a history must STRec's layers compute? Compares choices of k events with the dense network.

STRec's network is first trained with every row (configs/strec/oracle.yaml). Then each layer computes k rows of a
history, and the last layer one. The k events are the last event and those that rank highest by one of `CHOICES`. Where
the events that the dense network itself relies on do not beat the most recent ones, a sampler has nothing to learn.
An interrupted run continues if it is started again.

    python scripts/strec_oracle.py --out runs/strec-oracle --seeds 42,43,44
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seqrec.artifacts import write_text
from seqrec.commands import run
from seqrec.config import load
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation import intervals, metrics, ranking
from seqrec.models import attention_weights
from seqrec.models.base import PAD, Batch
from seqrec.models.strec import FORCED, Block, STRec, _real, _visible
from seqrec.training.checkpoint import load_checkpoint

CONFIG = Path(__file__).parent.parent / "configs/strec/oracle.yaml"
SPARSITIES = (0.8, 0.9, 0.95)
DENSE, BASE = "every event", "the most recent"


def by_rollout(dense: STRec, batch: Batch) -> Tensor:
    """Return each event's share (B, L) in the last position's output (attention rollout, Abnar and Zuidema 2020)."""
    visible_B11L = _visible(_real(batch))
    x_BLD = dense._embedded(batch.items)
    reached_BLL = torch.eye(x_BLD.shape[1]).expand(len(x_BLD), -1, -1)
    for block in dense.blocks:
        assert isinstance(block, Block)
        with attention_weights.kept() as weights:
            x_BLD = block.transform(block.attend(x_BLD, slice(None), visible_B11L))
        reached_BLL = (weights[0].mean(1) @ reached_BLL + reached_BLL) / 2  # the residual connection carries half
    return reached_BLL[:, -1]


def by_gradient(dense: STRec, batch: Batch) -> Tensor:
    """Return |gradient x input| (B, L) of the dense network's ten highest scores; the target is not read."""
    visible_B11L = _visible(_real(batch))
    with torch.enable_grad():
        embedded_BLD = dense._embedded(batch.items).detach().requires_grad_()
        x_BLD = embedded_BLD
        for block in dense.blocks:
            assert isinstance(block, Block)
            x_BLD = block.transform(block.attend(x_BLD, slice(None), visible_B11L))
        best_BK = (x_BLD[:, -1] @ dense.items.weight[1:].T).topk(min(10, dense.catalogue.num_items)).values
        (gradient_BLD,) = torch.autograd.grad(best_BK.sum(), embedded_BLD)
    return (gradient_BLD * embedded_BLD).sum(-1).abs().detach()


def by_recency(dense: STRec, batch: Batch) -> Tensor:
    """Return higher values (B, L) for later events."""
    return torch.arange(batch.items.shape[1]).float().expand(batch.items.shape)


def at_random(dense: STRec, batch: Batch) -> Tensor:
    """Return values (B, L) that depend on the item and its place, but on nothing that is learnt."""
    place_L = torch.arange(batch.items.shape[1])
    return ((batch.items * 7919 + place_L * 104_729 + batch.items[:, -1:] * 1_299_709) % 65_521).float()


Choice = Callable[[STRec, Batch], Tensor]
CHOICES: dict[str, Choice] = {
    BASE: by_recency,
    "oracle: attention rollout": by_rollout,
    "oracle: gradient x input": by_gradient,
    "random": at_random,
    "oldest": lambda dense, batch: -by_recency(dense, batch),
}


class Chosen(STRec):
    """A trained dense STRec whose layers compute the rows that `choice` ranks highest."""

    def __init__(self, dense: STRec, choice: Choice, k: int, keys: bool) -> None:
        options = replace(dense.options, sampling="position", noise="none", k=(k,) * (dense.options.layers - 1) + (1,))
        super().__init__(options, dense.catalogue)
        self.load_state_dict(dense.state_dict(), strict=False)  # the sampler, which is not called, has no weights there
        self.choice, self.keys, self.dense = choice, keys, [dense]  # in a list: not a part of this module
        self.eval()

    def _scores(self, batch: Batch, real_BL: Tensor | None, hard: bool) -> Tensor:
        score_BL = self.choice(self.dense[0], batch).masked_fill(batch.items == PAD, -FORCED)
        score_BL[:, -1] = torch.inf
        return score_BL

    def _gathered(self, batch: Batch) -> Tensor:
        """Return (B, 1, D); with `keys`, the first layer reads no other events either."""
        k = self.options.rows[0]
        if not self.keys or k >= batch.items.shape[1]:
            return super()._gathered(batch)
        kept_BK = self._scores(batch, None, hard=True).topk(k).indices
        x_BKD = self._embedded(batch.items).gather(1, kept_BK.unsqueeze(-1).expand(-1, -1, self.options.d_model))
        real_BK = batch.items.gather(1, kept_BK) != PAD
        real_BK[:, 0] = True
        for block in self.blocks:
            assert isinstance(block, Block)
            x_BKD = block.transform(block.attend(x_BKD, slice(None), real_BK[:, None, None]))
        return x_BKD[:, :1]


@torch.no_grad()
def ndcg(model: STRec, data: Sequences) -> np.ndarray:
    """Return NDCG@10 of each user's test case."""
    ranked = ranking.rank(ranking.model_scorer(model), data, sequences.cases(data, "test"), filter_seen=True)
    return metrics.ndcg(ranked.rank.numpy(), 10)


def compare(out: Path, dataset: str, seeds: list[int]) -> str:
    """Train the dense network with each seed; return a table, in which a user's NDCG is the mean over the seeds."""
    params = replace(load(CONFIG), dataset=dataset)
    prepared = run.prepare_data(params, out / dataset) / "sequences"
    data = sequences.load(prepared)
    values: dict[tuple[float, bool, str], list[np.ndarray]] = {}
    for seed in seeds:
        folder = out / dataset / f"seed-{seed}"
        run.train_model(params.with_overrides({"seed": seed}), "backbone", prepared, folder)
        dense = load_checkpoint(folder / "artifacts/backbone/finetuned").model.eval()
        assert isinstance(dense, STRec)
        values.setdefault((0.0, False, DENSE), []).append(ndcg(dense, data))
        for sparsity, keys, (name, choice) in product(SPARSITIES, (False, True), CHOICES.items()):
            k = max(1, round(dense.options.length * (1 - sparsity)))
            values.setdefault((sparsity, keys, name), []).append(ndcg(Chosen(dense, choice, k, keys), data))
    user = sequences.cases(data, "test").user.numpy()
    means = {row: np.mean(of_seeds, axis=0) for row, of_seeds in values.items()}
    lines = [
        f"{dataset}, n = {dense.options.length}, seeds {', '.join(map(str, seeds))}, split "
        f"{data.card['split_sha256'][:12]}. With a row for every event: {means[0.0, False, DENSE].mean():.4f}",
        "",
        f"| rows left out | events without a row | {' | '.join(CHOICES)} |",
        f"|---|---|{'---|' * len(CHOICES)}",
    ]
    for sparsity, keys in product(SPARSITIES, (False, True)):
        cells = []
        for name in CHOICES:
            value, recent = means[sparsity, keys, name], means[sparsity, keys, BASE]
            gain = intervals.bootstrap(value - recent, user, resamples=1000, seed=42, difference=True)
            shown = "" if name == BASE else f" ({gain})"
            cells.append(f"{value.mean():.4f}{shown}")
        lines.append(f"| {sparsity:.0%} | {'hidden' if keys else 'read by layer 1'} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write one table for each dataset, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/strec-oracle"))
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--datasets", default=",".join(load(CONFIG).datasets), help="keys of the config, with commas")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("seqrec").setLevel(logging.INFO)
    for dataset in arguments.datasets.split(","):
        table = compare(arguments.out, dataset, [int(seed) for seed in arguments.seeds.split(",")])
        write_text(arguments.out / dataset / "table.md", table)
        print(table)


if __name__ == "__main__":
    main()
