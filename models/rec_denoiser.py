"""Rec-Denoiser: learned binary masks on attention, and a Jacobian penalty (Chen et al., RecSys 2022, arXiv:2212.04120).

A plug-in around a backbone. Each of the backbone's `blocks` takes (B, L, D) as its first argument, followed by other
tensors with a batch dimension, and has an `attention` whose `weigh` replaces the softmax. Equation numbers are those of
the paper. This implementation differs from its text in these places:
- masks are drawn per example rather than per batch (`draws`), and the gradient estimate of a draw uses the loss of its
  example only, which is as unbiased;
- the estimate for a row of a mask uses only the losses of positions that it can affect (`credit`), which is as unbiased
  and has a fraction of the variance;
- mask probabilities start at `keep`, close to the backbone; at one half, which zero parameters give, training fails at
  the start;
- the penalties are means over valid mask entries and positions, so that their weights do not depend on the length;
- both passes of ARM use the same dropout, so that only the masks differ;
- the Jacobian is computed on a random share of each batch and scaled up, which keeps its expectation.

A mask entry is valid if the query may read the key and both are events. Other entries are neither drawn nor penalised
nor counted.

Shape suffixes, besides those of base.py and layers.py: X heads with own masks (1 or H), Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqrec.models import attention_weights
from seqrec.models.base import PAD, Batch, Catalogue, Options, SequenceModel, TaskLoss, require
from seqrec.models.bert4rec import BERT4Rec
from seqrec.models.layers import attention_bias
from seqrec.models.sasrec import SASRec
from seqrec.models.ssept import SSEPT
from seqrec.models.tisasrec import TiSASRec

BACKBONES: dict[str, type[SequenceModel]] = {
    "sasrec": SASRec,
    "bert4rec": BERT4Rec,
    "tisasrec": TiSASRec,
    "ssept": SSEPT,
}


@dataclass(frozen=True, kw_only=True)
class RecDenoiserOptions(Options):
    """Options of Rec-Denoiser."""

    backbone: Literal["sasrec", "bert4rec", "tisasrec", "ssept"] = "sasrec"
    d_model: int = 64
    layers: int = 2
    heads: int = 2
    dropout: float = 0.2
    attention: Literal["masked", "full", "strided", "entmax"] = "masked"  # full: no masks; strided: fixed; 1.5-entmax
    stride: int = 8  # strided: number of recent events, and distance of earlier ones
    l0: float = 0.01  # beta, weight of the expected share of kept entries; for masked only
    jacobian: float = 0.0001  # gamma, weight of eq. 12; 0.001 in the paper, which slows training with full softmax
    estimator: Literal["arm", "ar", "reinforce", "ste"] = "arm"  # gradient of the masks; ste: straight-through, biased
    baseline: Literal["none", "loo"] = "none"  # ar, reinforce: loo subtracts the mean loss of the other examples
    draws: Literal["example", "batch"] = "example"  # masks per example | per batch, as in Algorithm 1
    credit: Literal["position", "example"] = "position"  # losses used for a row: those it affects | all, as in eq. 10
    per_head: bool = False
    keep_diag: bool = False  # never mask an event's attention to itself
    keep: float = 0.9  # initial probability of keeping an entry
    mask_rate: float = 10.0  # learning rate of Phi relative to that of the other parameters
    binary: bool = False  # inference: weight kept entries by 1 instead of their probability
    jacobian_share: float = 0.25  # share of a batch for the penalty
    jacobian_projections: int = 1  # number of random projections (Hutchinson)
    jacobian_detach: bool = True  # false: the penalty of a block also trains the blocks before it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "stride", "jacobian_projections")
        self.at_least(0, "l0", "jacobian")
        require(self.attention == "masked" or self.l0 == 0, f"l0 must be 0: attention {self.attention} has no masks")
        scored = self.estimator in ("ar", "reinforce")
        require(self.baseline == "none" or scored, f"baseline must be none with estimator {self.estimator}")
        loo_by_batch = self.baseline == "loo" and self.draws == "batch"
        require(not loo_by_batch, "baseline must not be loo with draws: batch, whose examples all share one draw")
        require(0 < self.keep < 1, "keep must be between 0 and 1")
        require(self.mask_rate > 0, "mask_rate must be positive")
        require(0 < self.jacobian_share <= 1, "jacobian_share must be over 0 and at most 1")
        self._check_switches()
        self.of_backbone()

    def _check_switches(self) -> None:
        if self.attention != "masked":
            masks = ("estimator", "baseline", "draws", "credit", "per_head", "keep_diag", "keep", "mask_rate", "binary")
            self.check_unused(f"attention {self.attention} has no masks", *masks)
        if self.attention != "strided":
            self.check_unused(f"attention is {self.attention}", "stride")
        if self.estimator == "ste":
            self.check_unused("straight-through needs no credit", "credit")
        if self.jacobian == 0:
            self.check_unused("jacobian is 0", "jacobian_share", "jacobian_projections", "jacobian_detach")

    def of_backbone(self) -> Options:
        """Return the options of the backbone, which check their values; those not listed here have their defaults."""
        shared = ("length", "objective", "d_model", "layers", "heads", "dropout")
        return BACKBONES[self.backbone].Options(**{name: getattr(self, name) for name in shared})


class MaskedSoftmax(nn.Module):
    """A softmax whose weights are multiplied by a mask, without normalising them again (eq. 5)."""

    def __init__(self, options: RecDenoiserOptions) -> None:
        super().__init__()
        heads = options.heads if options.per_head else 1
        self.options = options
        self.raw_XLL = nn.Parameter(torch.zeros(heads, options.length, options.length))
        self.drawn_BXLL: Tensor | None = None  # set while a training loss is computed

    def logits(self, length: int) -> Tensor:
        """Return Phi (X, L, L) for windows of `length`; indices count back from the most recent event."""
        start = math.log(self.options.keep / (1 - self.options.keep))
        return start + self.options.mask_rate * self.raw_XLL[:, -length:, -length:]

    def at_test(self, length: int) -> Tensor:
        """Return the deterministic mask (X, L, L): the probabilities, with those up to one half set to zero.

        It has no gradient: only drawn masks are trained, and a contrastive view may be computed with this one.
        """
        keep_XLL = self.logits(length).detach().sigmoid()
        mask_XLL = (keep_XLL > 0.5).to(keep_XLL.dtype)
        if not self.options.binary:
            mask_XLL = mask_XLL * keep_XLL
        if self.options.keep_diag:
            mask_XLL = mask_XLL.masked_fill(torch.eye(length, dtype=torch.bool, device=mask_XLL.device), 1.0)
        return mask_XLL

    def forward(self, score_BHQL: Tensor) -> Tensor:
        """Return the masked attention weights (B, H, Q, L) of scores; the queries are the last Q positions."""
        queries, length = score_BHQL.shape[-2:]
        mask = self.at_test(length) if self.drawn_BXLL is None else self.drawn_BXLL
        return score_BHQL.softmax(-1) * mask[..., -queries:, :]


class StridedSoftmax(nn.Module):
    """A softmax over a fixed pattern: recent events, and every `stride`-th (Sparse Transformer, Child et al. 2019)."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, score_BHQL: Tensor) -> Tensor:
        """Return weights that are zero outside the pattern."""
        queries, length = score_BHQL.shape[-2:]
        place = torch.arange(length, device=score_BHQL.device)
        distance_QL = (place[-queries:, None] - place).abs()
        seen_QL = (distance_QL < self.stride) | (distance_QL % self.stride == 0)
        return score_BHQL.masked_fill(~seen_QL, float("-inf")).softmax(-1)


class Entmax15(nn.Module):
    """1.5-entmax, a softmax with exact zeros, by sorting (Peters et al., ACL 2019, Algorithm 2)."""

    def forward(self, score_BHQL: Tensor) -> Tensor:
        """Return [x - tau]_+^2 with x = (score - max) / 2 and tau such that the weights sum to 1."""
        x = (score_BHQL - score_BHQL.detach().amax(-1, keepdim=True)) / 2
        x = x.clamp(min=-2.0)  # tau is at least -1, so lower entries have no weight; -inf would make sums NaN
        with torch.no_grad():
            ordered = x.sort(-1, descending=True).values
            threshold = _threshold(ordered, torch.arange(1, x.shape[-1] + 1, device=x.device), cumulated=True)
            support = (threshold <= ordered).sum(-1, keepdim=True)
            inside = (x > threshold.gather(-1, support - 1)).to(x.dtype)
        tau = _threshold(x * inside, inside.sum(-1, keepdim=True), cumulated=False)
        return (x - tau).clamp(min=0).square() * inside


def _threshold(x: Tensor, size: Tensor, *, cumulated: bool) -> Tensor:
    """Return tau for the `size` non-zero entries of `x`; with `cumulated`, for its first 1, 2, ... entries."""
    total, square = (part.cumsum(-1) if cumulated else part.sum(-1, keepdim=True) for part in (x, x.square()))
    mean = total / size
    return mean - ((1 - square) / size + mean.square()).clamp(min=0).sqrt()


def mean_over_processes(value: Tensor) -> Tensor:
    """Return the mean of a number over the processes, as the divisor of a value that DDP averages."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    total = value.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


@contextmanager
def recorded(blocks: Sequence[nn.Module]) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of the blocks."""
    calls: list[tuple[Any, ...]] = []
    hooks = [block.register_forward_pre_hook(lambda _, arguments: calls.append(arguments)) for block in blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class RecDenoiser(SequenceModel):
    """A backbone with masked attention; without masks and penalties, it equals the backbone."""

    Options = RecDenoiserOptions
    options: RecDenoiserOptions
    objectives = SASRec.objectives  # those of the default backbone; instances have their own
    reads_events = True
    clipped_apart = ("raw_XLL",)  # its gradients are noisy estimates
    undecayed = ("raw_XLL",)  # eq. 4 decays Theta only; the penalty of Phi is `l0`

    def __init__(self, options: RecDenoiserOptions, catalogue: Catalogue) -> None:
        self.objectives = self.objectives_of(options)  # type: ignore[misc]
        super().__init__(options, catalogue)
        self.backbone = BACKBONES[options.backbone](options.of_backbone(), catalogue)
        self.biased = self.backbone.biased
        for block in self.blocks:
            block.attention.weigh = self._weigh()

    @classmethod
    def objectives_of(cls, options: RecDenoiserOptions) -> frozenset[str]:
        """See `SequenceModel.objectives_of`: those of the backbone."""
        return BACKBONES[options.backbone].objectives

    @classmethod
    def needs_of(cls, options: RecDenoiserOptions) -> frozenset[str]:
        """See `SequenceModel.needs_of`: what the backbone reads."""
        return BACKBONES[options.backbone].needs_of(options.of_backbone())

    def masked_maps(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return `attention_weights.maps` without and with the masks of the last layer; None if it has no masks."""
        if not self.masks:
            return None
        layer = self.blocks[-1].attention
        mask, layer.weigh = layer.weigh, None
        try:
            before = attention_weights.maps(self, batch)
        finally:
            layer.weigh = mask
        after = attention_weights.maps(self, batch)
        assert before is not None
        assert after is not None
        return before, after

    def _weigh(self) -> nn.Module | None:
        if self.options.attention == "masked":
            return MaskedSoftmax(self.options)
        if self.options.attention == "strided":
            return StridedSoftmax(self.options.stride)
        return Entmax15() if self.options.attention == "entmax" else None

    @property
    def blocks(self) -> list[Any]:
        """The backbone's blocks."""
        return list(self.backbone.blocks)  # type: ignore[arg-type]

    @property
    def masks(self) -> list[MaskedSoftmax]:
        """The masks of the layers; empty unless `attention` is masked."""
        return [block.attention.weigh for block in self.blocks] if self.options.attention == "masked" else []

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        return self.backbone(batch, last)

    def item_vectors(self) -> Tensor:
        return self.backbone.item_vectors()

    def valid(self, items_BL: Tensor) -> Tensor:
        """Return bool (B, L, L): the valid mask entries, where an event may read an event."""
        bias_BLL = attention_bias(items_BL, causal=not self.options.masked)
        valid_BLL: Tensor = (bias_BLL == 0) & (items_BL != PAD).unsqueeze(2)
        if self.options.keep_diag:
            valid_BLL = valid_BLL & ~torch.eye(items_BL.shape[1], dtype=torch.bool, device=items_BL.device)
        return valid_BLL

    @torch.no_grad()
    def sparsity(self, items_BL: Tensor) -> float:
        """Return the share of valid entries of the windows `items_BL` that the mask of inference sets to zero."""
        require(bool(self.masks), f"sparsity: attention {self.options.attention} has no masks")
        count_LL = self.valid(items_BL).sum(0)
        dropped_YLL = torch.cat([mask.at_test(items_BL.shape[1]) == 0 for mask in self.masks])
        return float((dropped_YLL * count_LL).sum() / (len(dropped_YLL) * count_LL.sum()).clamp(min=1))

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; adds the terms of masks and Jacobian."""
        try:
            with recorded(self.blocks) as calls:
                terms = self._masked(batch, task) if self.masks else {"task": task(self(batch)).sum()}
            if self.options.jacobian:
                norm = self._jacobian(calls[-len(self.blocks) :], batch.items != PAD)
                terms["jacobian"] = self.options.jacobian * norm
            return terms
        finally:
            for mask in self.masks:
                mask.drawn_BXLL = None

    def _masked(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """Return the task's loss with drawn masks and an estimated gradient of Phi, and the expected L0 norm."""
        valid_BLL = self.valid(batch.items)
        phi = [mask.logits(batch.items.shape[1]) for mask in self.masks]
        keep = [phi_XLL.sigmoid() for phi_XLL in phi]
        uniform = self._uniform(len(batch.items), keep)
        with torch.no_grad():
            opposite_BL = self._opposite_loss(batch, task, uniform, keep, valid_BLL)
        loss_BL = self._loss(batch, task, self._drawn(uniform, keep, valid_BLL))
        loss = loss_BL.sum()
        if self.options.estimator != "ste":
            with torch.no_grad():
                slope = self._slope(loss_BL, opposite_BL, batch.items != PAD, uniform, keep, valid_BLL)
            surrogate = torch.stack([(a * b).sum() for a, b in zip(phi, slope, strict=True)]).sum()
            loss = loss + (surrogate - surrogate.detach())  # changes only the gradient
        terms = {"task": loss}
        if self.options.l0:
            terms["l0"] = self.options.l0 * self._l0(keep, valid_BLL)
        return terms

    def _uniform(self, examples: int, keep: Sequence[Tensor]) -> list[Tensor]:
        """Draw U for every layer: (B, X, L, L), or (1, X, L, L) for all examples."""
        rows = examples if self.options.draws == "example" else 1
        return [torch.rand(rows, *keep_XLL.shape, device=keep_XLL.device) for keep_XLL in keep]

    def _drawn(self, uniform: Sequence[Tensor], keep: Sequence[Tensor], valid_BLL: Tensor) -> list[Tensor]:
        """Return Z = [U < Pi] of every layer (B, X, L, L), 1 where invalid; straight-through passes Pi's gradient."""
        valid_B1LL = valid_BLL.unsqueeze(1)
        drawn = [((u < pi) | ~valid_B1LL).to(pi.dtype) for u, pi in zip(uniform, keep, strict=True)]
        if self.options.estimator == "ste":
            return [z + valid_B1LL * (pi - pi.detach()) for z, pi in zip(drawn, keep, strict=True)]
        return drawn

    def _loss(self, batch: Batch, task: TaskLoss, drawn: Sequence[Tensor]) -> Tensor:
        for mask, drawn_BXLL in zip(self.masks, drawn, strict=True):
            mask.drawn_BXLL = drawn_BXLL
        return task(self(batch))

    def _opposite_loss(
        self, batch: Batch, task: TaskLoss, uniform: Sequence[Tensor], keep: Sequence[Tensor], valid_BLL: Tensor
    ) -> Tensor | None:
        """Return ARM's first loss (B, L), that of Z = [U > 1 - Pi]; the state of the generator is restored."""
        if self.options.estimator != "arm":
            return None
        opposite = self._drawn([1 - u for u in uniform], keep, valid_BLL)
        devices = [batch.items.device] if batch.items.is_cuda else []
        with torch.random.fork_rng(devices):
            return self._loss(batch, task, opposite)

    def _slope(
        self,
        loss_BL: Tensor,
        opposite_BL: Tensor | None,
        real_BL: Tensor,
        uniform: Sequence[Tensor],
        keep: Sequence[Tensor],
        valid_BLL: Tensor,
    ) -> list[Tensor]:
        """Return the estimated gradient of the task in Phi (X, L, L) of every layer, by eqs. 10, 11 or REINFORCE."""
        if opposite_BL is not None:
            weight_BL, direction = opposite_BL - loss_BL, [u - 0.5 for u in uniform]  # (10)
        else:
            weight_BL = loss_BL - self._baseline(loss_BL.sum(1), real_BL)
            if self.options.estimator == "ar":
                direction = [1 - 2 * u for u in uniform]  # (11)
            else:
                direction = [(u < pi).to(pi.dtype) - pi for u, pi in zip(uniform, keep, strict=True)]
        weights = [credit_BL.unsqueeze(2) * valid_BLL for credit_BL in self._credit(weight_BL)]
        if self.options.draws == "batch":
            return [weight_BLL.sum(0) * part[0] for weight_BLL, part in zip(weights, direction, strict=True)]
        pairs = zip(weights, direction, strict=True)
        return [torch.einsum("blm,bxlm->xlm", weight_BLL, part) for weight_BLL, part in pairs]

    def _credit(self, weight_BL: Tensor) -> list[Tensor]:
        """Return, for each layer, the sum of `weight_BL` over the positions that each query of its mask can affect.

        An output of the last layer affects only its own position; one of an earlier layer affects all later positions,
        or all positions if attention is bidirectional. Other positions add noise with mean zero to eqs. 10 and 11.
        """
        below = len(self.masks) - 1
        if self.options.credit == "example":
            return [weight_BL.sum(1, keepdim=True).expand_as(weight_BL)] * (below + 1)
        reached_BL = weight_BL.flip(1).cumsum(1).flip(1)
        if self.options.masked:
            reached_BL = reached_BL[:, :1].expand_as(weight_BL)
        return [reached_BL] * below + [weight_BL]

    def _baseline(self, loss_B: Tensor, real_BL: Tensor) -> Tensor:
        """Return an estimate (B, L) of the loss of each event that does not depend on its example's draw."""
        events_B = real_BL.sum(1)
        if self.options.baseline == "none":
            return torch.zeros_like(real_BL, dtype=loss_B.dtype)
        rest_B = (loss_B.sum() - loss_B) / (events_B.sum() - events_B).clamp(min=1)
        return rest_B.unsqueeze(1) * real_BL

    def _l0(self, keep: Sequence[Tensor], valid_BLL: Tensor) -> Tensor:
        """Return the expected share of kept entries, averaged over layers, heads, examples and valid entries."""
        count_LL = valid_BLL.sum(0).to(keep[0].dtype)
        keep_YLL = torch.cat(list(keep))
        return (keep_YLL * count_LL).sum() / (len(keep_YLL) * mean_over_processes(count_LL.sum()).clamp(min=1))

    def _jacobian(self, calls: Sequence[tuple[Any, ...]], real_BL: Tensor) -> Tensor:
        """Return the sum over blocks of ||J||_F^2 per valid position (eq. 12), estimated on a share of the batch.

        E ||eta^T J||^2 = ||J||_F^2 for eta ~ N(0, I) (Hutchinson). Outputs at padding are ignored.
        """
        options = self.options
        rows = torch.randperm(len(real_BL), device=real_BL.device)[: math.ceil(options.jacobian_share * len(real_BL))]
        for mask in self.masks:
            assert mask.drawn_BXLL is not None
            mask.drawn_BXLL = mask.drawn_BXLL[rows].detach()  # only the task trains masks
        norm = torch.zeros((), device=real_BL.device)
        # fused kernels have no second derivatives
        with torch.autocast(real_BL.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
            for block, (x_BLD, *others) in zip(self.blocks, calls, strict=True):
                x_BLD = x_BLD[rows].float()
                if options.jacobian_detach:
                    x_BLD = x_BLD.detach().requires_grad_()
                y_BLD = block(x_BLD, *(part[rows] if isinstance(part, Tensor) else part for part in others))
                for _ in range(options.jacobian_projections):
                    noise_BLD = torch.randn_like(y_BLD) * real_BL[rows].unsqueeze(2)
                    (gradient_BLD,) = torch.autograd.grad(y_BLD, x_BLD, noise_BLD, create_graph=True)
                    norm = norm + gradient_BLD.square().sum()
        scale = len(real_BL) / max(1, len(rows)) / options.jacobian_projections
        return norm * scale / mean_over_processes(real_BL.sum().float()).clamp(min=1)
