"""Losses as pure functions on tensors: queries, item vectors and targets in, one value per target out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGITS_IN_MEMORY = 4_000_000  # floats in a block of logits: 16 MB, about the size of a cache
SAMPLED_LOGITS = 1_000_000  # the same with sampled items
LOGITS_ON_GPU = 64_000_000  # the same on a GPU, with or without sampling: one that gets small blocks waits for the host

VectorsOf = Callable[[Tensor], Tensor]  # items (...) -> their vectors (..., D)


class PastItems(NamedTuple):
    """The past items of each query's user: those of one row, up to a column."""

    items_BL: Tensor  # (B, L) int64; padding and mask are ignored
    row_N: Tensor  # (N,) int64, row of each query
    stop_N: Tensor  # (N,) int64, first column that is not in the past


def cross_entropy(
    query_ND: Tensor, item_VD: Tensor, target_N: Tensor, *, precision: str = "fp32", past: PastItems | None = None
) -> Tensor:
    """Return -log softmax over items 1..V-1 at the target (N,), with one block of logits in memory at a time.

    The items of `past` are no candidates, except for the target.

    The forward pass also computes the gradient, block by block, so that each logit is computed once. This requires
    equal weights of all targets in whatever follows, as in a sum or a mean. With unequal weights, the backward pass
    computes the item gradient again on a CPU and fails on a GPU, where checking the weights would stall the stream.

    With `precision` bf16, the factors of matrix products are rounded (to TF32 on a GPU); logits, softmax and sums
    remain fp32.
    """
    with _matrix_products(precision):
        value: Tensor = _CrossEntropy.apply(query_ND, item_VD, target_N, past)  # type: ignore[no-untyped-call]
    return value


def sampled_cross_entropy(
    query_ND: Tensor,
    vectors_of: VectorsOf,
    target_N: Tensor,
    negative_K: Tensor,
    log_expected_V: Tensor,
    *,
    precision: str = "fp32",
) -> Tensor:
    """Return -log softmax over the target and `negative_K`, items drawn once for all targets (N,).

    Each negative's score is lowered by the log of its expected number of draws (logQ correction, Bengio and Senecal
    2008), which makes the denominator an unbiased estimate of the full one. The target is always a candidate, so its
    score is not corrected; drawn items that equal the target are ignored.

    As in `cross_entropy`, gradients are computed block by block in the forward pass, and `precision` rounds factors.
    `log_expected_V` is the log of the expected number of draws of each item.
    """
    positive_ND, drawn_KD = vectors_of(target_N), vectors_of(negative_K)
    with _matrix_products(precision):
        value: Tensor = _SampledCrossEntropy.apply(  # type: ignore[no-untyped-call]
            query_ND.float(), positive_ND.float(), drawn_KD.float(), target_N, negative_K, log_expected_V[negative_K]
        )
    return value


def binary_cross_entropy(
    query_ND: Tensor, vectors_of: VectorsOf, target_N: Tensor, negative_NK: Tensor, *, beta: float = 1.0
) -> Tensor:
    """Return -beta log sigmoid(s+) - sum over negatives of log(1 - sigmoid(s-)), per target (N,).

    SASRec has one negative and a `beta` of 1.
    """
    positive_N, score_NK = _scores(query_ND, vectors_of, target_N, negative_NK)
    rival_NK = F.logsigmoid(-score_NK).masked_fill(negative_NK == target_N.unsqueeze(1), 0.0)
    return -beta * F.logsigmoid(positive_N) - rival_NK.sum(1)


def gbce_beta(t: float, negatives: int, num_items: int) -> float:
    """Return the `beta` of gSASRec's gBCE (Petrov and Macdonald 2023, arXiv:2308.07192, eqs. 7 and 9), for t in [0, 1].

    It corrects the overconfidence caused by sampling; t = 0 gives 1.
    """
    alpha = negatives / (num_items - 1)
    return alpha * (t * (1 - 1 / alpha) + 1 / alpha)


def bayesian_personalized_ranking(
    query_ND: Tensor, vectors_of: VectorsOf, target_N: Tensor, negative_NK: Tensor
) -> Tensor:
    """Return the mean over negatives of -log sigmoid(s+ - s-), per target (N,) (Rendle et al. 2009)."""
    positive_N, score_NK = _scores(query_ND, vectors_of, target_N, negative_NK)
    rival_NK = F.logsigmoid(positive_N.unsqueeze(1) - score_NK)
    other_NK = negative_NK != target_N.unsqueeze(1)
    return -(rival_NK * other_NK).sum(1) / other_NK.sum(1).clamp(min=1)


def info_nce(view_BD: Tensor, other_BD: Tensor, label_B: Tensor) -> Tensor:
    """Return InfoNCE (2 B,): -log softmax of each view at its partner, over the partner and views with other labels."""
    view_ND = torch.cat([view_BD, other_BD])
    label_N = label_B.repeat(2)
    partner_N = torch.arange(len(label_N), device=label_N.device).roll(len(label_B))
    hidden_NN = (label_N.unsqueeze(1) == label_N).scatter(1, partner_N.unsqueeze(1), False)  # and each view itself
    score_NN = (view_ND @ view_ND.T).masked_fill(hidden_NN, float("-inf"))
    return F.cross_entropy(score_NN, partner_N, reduction="none")


@contextlib.contextmanager
def _matrix_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "bf16" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _scores(query_ND: Tensor, vectors_of: VectorsOf, target_N: Tensor, negative_NK: Tensor) -> tuple[Tensor, Tensor]:
    positive_N = (query_ND * vectors_of(target_N)).sum(-1)
    return positive_N, torch.einsum("nd,nkd->nk", query_ND, vectors_of(negative_NK))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_ND: Tensor, item_VD: Tensor, target_N: Tensor, past: PastItems | None) -> Tensor:
        query_ND, item_VD = query_ND.float(), item_VD.float()
        wanted = any(ctx.needs_input_grad)
        query_gradient = torch.empty_like(query_ND) if wanted else None
        item_gradient = torch.zeros_like(item_VD) if wanted else None
        value_N = _blocks(query_ND, item_VD, target_N, query_gradient, item_gradient, past)
        if wanted:
            ctx.past = past
            ctx.save_for_backward(query_ND, item_VD, target_N, query_gradient, item_gradient)
        return value_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query_ND, item_VD, target_N, query_gradient, item_gradient = ctx.saved_tensors
        if len(upstream_N) == 0:
            return query_gradient, item_gradient, None, None
        if _uniform(upstream_N):
            item_gradient = item_gradient * upstream_N[0]
        else:
            item_gradient = torch.zeros_like(item_VD)
            _blocks(query_ND, item_VD, target_N, torch.empty_like(query_ND), item_gradient, ctx.past, upstream_N)
        return query_gradient * upstream_N.unsqueeze(1), item_gradient, None, None


def _uniform(upstream_N: Tensor) -> bool:
    """Return whether all targets have the same weight; on a GPU this is asserted, without waiting for it."""
    same = (upstream_N == upstream_N[:1]).all()
    if not upstream_N.is_cuda:
        return bool(same)
    torch._assert_async(same)
    return True


def _blocks(
    query_ND: Tensor,
    item_VD: Tensor,
    target_N: Tensor,
    query_gradient: Tensor | None,
    item_gradient: Tensor | None,
    past: PastItems | None,
    weight_N: Tensor | None = None,
) -> Tensor:
    """Fill the gradients (items': weighted by `weight_N`) and return the values (N,)."""
    candidate_VD, goal_N = item_VD[1:], (target_N - 1).unsqueeze(1)  # padding is not a candidate
    limit, most = (LOGITS_ON_GPU, len(query_ND)) if query_ND.is_cuda else (LOGITS_IN_MEMORY, 1024)
    floats = max(limit, item_VD.numel())  # small blocks would read a huge item table too often
    rows = max(1, min(most, floats // max(1, len(candidate_VD)), len(query_ND)))
    buffer = query_ND.new_empty(rows, len(candidate_VD))
    value_N = query_ND.new_empty(len(query_ND))
    for start in range(0, len(query_ND), rows):
        part = slice(start, min(start + rows, len(query_ND)))
        query, goal = query_ND[part], goal_N[part]
        logits = buffer[: len(query)]
        torch.mm(query, candidate_VD.T, out=logits)
        if past is not None:
            _exclude(logits, goal, past.items_BL[past.row_N[part]], past.stop_N[part])
        lead_N = logits.amax(1) - logits.gather(1, goal).squeeze(1)
        probability = torch.softmax(logits, 1, out=logits)
        torch.sub(lead_N, probability.amax(1).log(), out=value_N[part])  # the largest is 1 / sum exp(x - max x)
        if query_gradient is None or item_gradient is None:
            continue
        gradient = probability.scatter_add_(1, goal, probability.new_full(goal.shape, -1.0))
        torch.mm(gradient, candidate_VD, out=query_gradient[part])
        weighted = query if weight_N is None else query * weight_N[part].unsqueeze(1)
        torch.addmm(item_gradient[1:], gradient.T, weighted, out=item_gradient[1:])
    return value_N


def _exclude(logits_NV: Tensor, goal_N1: Tensor, past_NL: Tensor, stop_N: Tensor) -> None:
    """Set the logits of past items to -inf, except for the target's."""
    goal_logit_N1 = logits_NV.gather(1, goal_N1)
    column_L = torch.arange(past_NL.shape[1], device=past_NL.device)
    chosen_NL = (column_L < stop_N.unsqueeze(1)) & (past_NL > 0) & (past_NL <= logits_NV.shape[1])
    logits_NV.scatter_(1, torch.where(chosen_NL, past_NL - 1, goal_N1), float("-inf"))
    logits_NV.scatter_(1, goal_N1, goal_logit_N1)


class _SampledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        """Return the values (N,); `given` are the arguments of `_sampled_blocks` without the weights."""
        value_N, query_gradient, positive_gradient, drawn_gradient = _sampled_blocks(*given)
        ctx.save_for_backward(*given, query_gradient, positive_gradient, drawn_gradient)
        return value_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        *given, query_gradient, positive_gradient, drawn_gradient = ctx.saved_tensors
        weight_N1 = upstream_N.unsqueeze(1)
        if not _uniform(upstream_N):
            drawn_gradient = _sampled_blocks(*[*given, upstream_N])[3]
        elif len(upstream_N):
            drawn_gradient = drawn_gradient * upstream_N[0]
        return query_gradient * weight_N1, positive_gradient * weight_N1, drawn_gradient, None, None, None


def _sampled_blocks(
    query_ND: Tensor,
    positive_ND: Tensor,
    drawn_KD: Tensor,
    target_N: Tensor,
    negative_K: Tensor,
    correction_K: Tensor,
    weight_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the values (N,), and the gradients of the first three arguments (drawn items': weighted)."""
    rows = max(1, (LOGITS_ON_GPU if query_ND.is_cuda else SAMPLED_LOGITS) // max(1, len(drawn_KD)))
    values, query_gradients, positive_gradients, drawn_gradient = [], [], [], torch.zeros_like(drawn_KD)
    for start in range(0, max(1, len(query_ND)), rows):
        part = slice(start, start + rows)
        query, positive = query_ND[part], positive_ND[part]
        lead_N1 = (query * positive).sum(1, keepdim=True)
        logits = torch.addmm(-correction_K, query, drawn_KD.T)
        hit_NK = negative_K == target_N[part].unsqueeze(1)
        logits.masked_fill_(hit_NK, torch.finfo(logits.dtype).min)  # finite, as a row may have nothing but hits
        largest_N1 = logits.amax(1, keepdim=True)
        share = torch.softmax(logits, 1, out=logits)  # of each drawn item among them
        drawn_N1 = largest_N1 - share.amax(1, keepdim=True).log()  # the largest is 1 / sum exp(x - max x)
        total_N1 = torch.logaddexp(drawn_N1, lead_N1)
        weight_N1, gradient_N1 = (drawn_N1 - total_N1).exp(), torch.expm1(lead_N1 - total_N1)
        values.append((total_N1 - lead_N1).squeeze(1))
        query_gradients.append(torch.addcmul(gradient_N1 * positive, weight_N1, share @ drawn_KD))
        positive_gradients.append(gradient_N1 * query)
        weighted = query * (weight_N1 if weight_N is None else weight_N1 * weight_N[part].unsqueeze(1))
        drawn_gradient.addmm_(share.T, weighted)
    return torch.cat(values), torch.cat(query_gradients), torch.cat(positive_gradients), drawn_gradient
