"""What must FLASH4Rec's experts know of an event, and when must Top-K dropout act? Trains variants of both.

Every row has the data and the settings of the row `flash4rec` of configs/flash4rec/parts.yaml. In the variants of the
routing, only what the router reads is changed, once without any network: one expert of four still computes each event.
`low-rank-experts` has four experts of rank 16 beside the dense network of `no-experts`; all of them compute each event,
weighted by what `Summary` tells of it, or by what it tells of another event (`low-rank-experts-permuted`). An
interrupted run continues if it is started again.

    python scripts/flash4rec_variants.py --out runs/flash4rec-variants --seeds 42,43,44

Shape suffixes are those of models/flash4rec.py; R is the width of what a router reads.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec import models
from seqrec.artifacts import write_text
from seqrec.commands import run
from seqrec.commands.benchmark import benchmark
from seqrec.config import Params, load
from seqrec.data import sequences
from seqrec.models import flash4rec
from seqrec.models.base import PAD, Batch, Catalogue, SequenceModel
from seqrec.models.flash4rec import ROUTING, Block, FLASH4Rec, FLASH4RecOptions

PARTS = Path(__file__).parent.parent / "configs/flash4rec/parts.yaml"
ROW = "flash4rec"
BUCKETS = 32  # of popularity and of time gaps, both logarithmic
RANK = 16


def gaps(batch: Batch) -> Tensor:
    """Return the seconds (B, L) since the previous event; 0 for the first one and at padding."""
    before_BL = F.pad(batch.times[:, :-1], (1, 0))  # no time is above 0, that of padding
    return (batch.times - before_BL).clamp(min=0).float()


def mean_so_far(x_BLD: Tensor, real_BL: Tensor) -> Tensor:
    """Return the normalised mean (B, L, D) of each event and those before it; 0 before the first one."""
    real_BL1 = real_BL.unsqueeze(-1)
    mean_BLD = (x_BLD * real_BL1).float().cumsum(1) / real_BL1.cumsum(1).clamp(min=1)
    return F.layer_norm(mean_BLD, mean_BLD.shape[-1:])


class Router(nn.Module):
    """Computes logits from what was noted of each event, in place of the events' vectors."""

    noted: Tensor  # (B, L), or (B, L, R)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return the logits (N, X) of the last N / B positions."""
        queries = len(x_ND) // len(self.noted)
        logits: Tensor = self.network(self.noted[:, -queries:].flatten(0, 1))
        return logits


class Routed(FLASH4Rec):
    """FLASH4Rec with other routers; each subclass says what they read and how they weigh it."""

    counts: ClassVar[Tensor | None] = None  # (V,) training events of each item, for the models that are built next
    count_V: Tensor
    batch: Batch

    def __init__(self, options: FLASH4RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        unknown_V = torch.zeros(catalogue.num_items + 1, dtype=torch.long)
        self.register_buffer("count_V", unknown_V if self.counts is None else self.counts.clone())
        for block in self.blocks:
            assert isinstance(block, Block)
            self.reroute(block)
            block.register_forward_pre_hook(self._note)

    @classmethod
    def needs_of(cls, options: FLASH4RecOptions) -> frozenset[str]:
        """See `SequenceModel.needs_of`."""
        return super().needs_of(options) | {"times"}

    def reroute(self, block: Block) -> None:
        """Give the block's experts their new router."""
        block.experts.router = Router(self.network(block))

    def network(self, block: Block) -> nn.Module:
        """Return the module that turns what is noted of N events into logits (N, X)."""
        return nn.Embedding(BUCKETS, self.options.experts)

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return what the routers may know of each event, given the input of their block."""
        raise NotImplementedError

    def _note(self, block: Block, inputs: tuple[Any, ...]) -> None:
        block.experts.router.noted = self.note(inputs[0], self.batch)

    def _encode(self, batch: Batch, last: bool) -> tuple[Tensor, Tensor]:
        self.batch = batch
        return super()._encode(batch, last)


class HistoryMean(Routed):
    """The router reads the mean of the history so far."""

    def network(self, block: Block) -> nn.Module:
        """Return the router of FLASH4Rec."""
        router: nn.Module = block.experts.router
        return router

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the mean (B, L, D)."""
        return mean_so_far(x_BLD, batch.items != PAD)


class FixedRandom(Routed):
    """Each item has one expert, drawn at random for each block; its weight is 1."""

    def network(self, block: Block) -> nn.Module:
        """Return a constant table of logits (V, X)."""
        seed = next(number for number, known in enumerate(self.blocks) if known is block)
        items, experts = self.catalogue.num_items + 1, self.options.experts
        expert_V = torch.randint(experts, (items,), generator=torch.Generator().manual_seed(seed))
        return nn.Embedding.from_pretrained(1e4 * F.one_hot(expert_V, experts).float(), freeze=True)

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the items (B, L)."""
        return batch.items


class Popularity(Routed):
    """The router reads how often the item occurs in training, in steps of half a power of two."""

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the bucket (B, L) of each event."""
        return (2 * (1 + self.count_V[batch.items]).log2()).long().clamp(max=BUCKETS - 1)


class TimeGap(Routed):
    """The router reads the time since the previous event, in powers of two."""

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the bucket (B, L) of each event."""
        return (1 + gaps(batch)).log2().long().clamp(max=BUCKETS - 1)


class LowRank(nn.Module):
    """Adds four linear experts of rank `RANK`, weighted by the router's softmax, to a dense network."""

    def __init__(self, dense: nn.Module, router: Router, d_model: int) -> None:
        super().__init__()
        self.dense, self.router = dense, router
        self.inner = nn.Parameter(flash4rec._normal(4, d_model, RANK))
        self.outer = nn.Parameter(0.1 * flash4rec._normal(4, RANK, d_model))

    def forward(self, x_BLD: Tensor, real_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, L, D), and zeros for `ROUTING`."""
        weight_BLX = self.router(x_BLD.flatten(0, 1)).softmax(-1).unflatten(0, x_BLD.shape[:2])
        hidden_BLXK = torch.einsum("bld,xdk->blxk", x_BLD, self.inner) * weight_BLX.unsqueeze(-1)
        added_BLD = torch.einsum("blxk,xkd->bld", hidden_BLXK, self.outer)
        return self.dense(x_BLD, real_BL)[0] + added_BLD, x_BLD.new_zeros(len(ROUTING))


class Summary(Routed):
    """Low-rank experts, weighted by the history's mean, the time gap, the popularity and the position."""

    def reroute(self, block: Block) -> None:
        """Put the experts beside the block's dense network."""
        d_model = self.options.d_model
        block.experts = LowRank(block.experts, Router(nn.Linear(d_model + 3, 4)), d_model)

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the mean and three logarithms, scaled to about 1 (B, L, D + 3)."""
        real_BL = batch.items != PAD
        values = (gaps(batch), self.count_V[batch.items], real_BL.cumsum(1))
        logs_BL3 = torch.stack([value_BL.float().log1p() / 5 for value_BL in values], -1)
        return torch.cat([mean_so_far(x_BLD, real_BL), logs_BL3], -1)


class PermutedSummary(Summary):
    """The same, but each event is weighted by what belongs to another event of the batch."""

    def note(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        """Return the summary (B, L, D + 3), permuted among the events; outside training, in a fixed order."""
        own_BLR, real_BL = super().note(x_BLD, batch), batch.items != PAD
        generator = None if self.training else torch.Generator().manual_seed(0)
        event_NR = own_BLR[real_BL]
        given_BLR = own_BLR.clone()
        given_BLR[real_BL] = event_NR[torch.randperm(len(event_NR), generator=generator)]
        return given_BLR


class DropoutBeforeSoftmax(FLASH4Rec):
    """Top-K dropout hides keys from the softmax."""

    def topk_dropout(self, weight_BLL: Tensor, real_BL: Tensor, k: int, p: float, scope: str) -> Tensor:
        """Return (B, L, L): the softmax without the dropped keys, which is that of all keys, divided by the rest."""
        index_BLK = weight_BLL.topk(min(k, weight_BLL.shape[-1]), dim=-1).indices
        kept_BLK = (torch.rand(index_BLK.shape, device=index_BLK.device) >= p).to(weight_BLL.dtype)
        kept_BLL = weight_BLL * torch.ones_like(weight_BLL).scatter(-1, index_BLK, kept_BLK)
        return kept_BLL / kept_BLL.sum(-1, keepdim=True).clamp(min=1e-6)

    def _encode(self, batch: Batch, last: bool) -> tuple[Tensor, Tensor]:
        with mock.patch.object(flash4rec, "topk_dropout", self.topk_dropout):
            return super()._encode(batch, last)


@dataclass(frozen=True, kw_only=True)
class AnnealedOptions(FLASH4RecOptions):
    """Options of `AnnealedDropout`."""

    epochs: int = 10  # those of the training


class AnnealedDropout(DropoutBeforeSoftmax):
    """Top-K dropout as in FLASH4Rec, but its rate falls linearly, to 0 in the last epoch."""

    Options = AnnealedOptions
    original = staticmethod(flash4rec.topk_dropout)
    epoch: Tensor  # () int64, epochs begun; in the state that an interrupted training continues from

    def __init__(self, options: AnnealedOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.long))

    def on_epoch(self) -> None:
        """See `SequenceModel.on_epoch`."""
        self.epoch += 1

    def topk_dropout(self, weight_BLL: Tensor, real_BL: Tensor, k: int, p: float, scope: str) -> Tensor:
        """Return the weights (B, L, L) after dropout with this epoch's share of `p`."""
        rate = p * (1 - (int(self.epoch) - 1) / max(1, self.options.epochs - 1))
        return self.original(weight_BLL, real_BL, k, rate, scope)


VARIANTS: dict[str, type[SequenceModel]] = {
    "routed-by-history-mean": HistoryMean,
    "routed-at-random": FixedRandom,
    "routed-by-popularity": Popularity,
    "routed-by-time-gap": TimeGap,
    "topk-dropout-before-softmax": DropoutBeforeSoftmax,
    "annealed-topk-dropout": AnnealedDropout,
    "low-rank-experts": Summary,
    "low-rank-experts-permuted": PermutedSummary,
}


def settings() -> Params:
    """Return the settings of parts.yaml with the rows `flash4rec` and `VARIANTS`, which are registered as models."""
    params = load(PARTS)
    rows = {ROW: params.models[ROW]}
    for name, variant in VARIANTS.items():
        models.register(name, variant)
        options = params.models["no-experts" if issubclass(variant, Summary) else ROW]["options"]
        if variant is AnnealedDropout:
            options = {**options, "epochs": params.section("finetune", model=ROW).epochs}
        rows[name] = {**rows[ROW], "architecture": name, "options": options}
    return replace(params, models=rows, leaderboard=tuple(rows))


def main() -> None:
    """Train what is missing, and write benchmark.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/flash4rec-variants"))
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--only", default="", help="rows to train, with commas; the table has all finished rows")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("seqrec").setLevel(logging.INFO)
    params, out = settings(), arguments.out
    write_text(out / "variants.yaml", params.as_yaml())
    data = run.prepare_data(params, out)
    Routed.counts = sequences.load(data / "sequences").count
    benchmark(
        config_file=out / "variants.yaml", out=out, data=data, seeds=arguments.seeds, only=arguments.only, base=ROW
    )
    print((out / "benchmark.md").read_text())


if __name__ == "__main__":
    main()
