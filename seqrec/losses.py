"""Losses as pure functions on tensors: queries, item vectors and targets in, one value per target out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_IN_MEMORY = 4_000_000  # floats of one block of logits: 16 MB stays near the cache


def cross_entropy(query_ND: Tensor, item_VD: Tensor, target_N: Tensor) -> Tensor:
    """Return -log softmax over items 1..V-1 at the target (N,), never holding more than a block of logits.

    The gradient is computed in the forward pass, block by block, so each logit is computed once. That needs every
    target to be weighted alike by what follows (a sum or a mean); other weights make the backward pass compute the
    item gradient again on a CPU, and are refused on a GPU, where finding out would stall the stream.
    """
    value: Tensor = _CrossEntropy.apply(query_ND, item_VD, target_N)  # type: ignore[no-untyped-call]
    return value


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_ND: Tensor, item_VD: Tensor, target_N: Tensor) -> Tensor:
        query_ND, item_VD = query_ND.float(), item_VD.float()
        wanted = any(ctx.needs_input_grad)
        query_gradient = torch.empty_like(query_ND) if wanted else None
        item_gradient = torch.zeros_like(item_VD) if wanted else None
        value_N = _blocks(query_ND, item_VD, target_N, query_gradient, item_gradient, None)
        if wanted:
            ctx.save_for_backward(query_ND, item_VD, target_N, query_gradient, item_gradient)
        return value_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor, Tensor, None]:
        query_ND, item_VD, target_N, query_gradient, item_gradient = ctx.saved_tensors
        if len(upstream_N) == 0:
            return query_gradient, item_gradient, None
        uniform = (upstream_N == upstream_N[0]).all()
        if upstream_N.is_cuda:
            torch._assert_async(uniform)
        elif not uniform:
            item_gradient = torch.zeros_like(item_VD)
            _blocks(query_ND, item_VD, target_N, torch.empty_like(query_ND), item_gradient, upstream_N)
            return query_gradient * upstream_N.unsqueeze(1), item_gradient, None
        return query_gradient * upstream_N.unsqueeze(1), item_gradient * upstream_N[0], None


def _blocks(
    query_ND: Tensor,
    item_VD: Tensor,
    target_N: Tensor,
    query_gradient: Tensor | None,
    item_gradient: Tensor | None,
    weight_N: Tensor | None,
) -> Tensor:
    """Fill the gradients (items': weighted by `weight_N`) and return the values (N,)."""
    candidate_VD, goal_N = item_VD[1:], (target_N - 1).unsqueeze(1)  # padding is no candidate
    rows = max(1, min(1024, LOGITS_IN_MEMORY // max(1, len(candidate_VD)), len(query_ND)))
    buffer = query_ND.new_empty(rows, len(candidate_VD))
    value_N = query_ND.new_empty(len(query_ND))
    for start in range(0, len(query_ND), rows):
        part = slice(start, min(start + rows, len(query_ND)))
        query, goal = query_ND[part], goal_N[part]
        logits = buffer[: len(query)]
        torch.mm(query, candidate_VD.T, out=logits)
        torch.log_softmax(logits, 1, out=logits)
        torch.neg(logits.gather(1, goal).squeeze(1), out=value_N[part])
        if query_gradient is None or item_gradient is None:
            continue
        gradient = logits.exp_()
        gradient.scatter_add_(1, goal, gradient.new_full(goal.shape, -1.0))
        torch.mm(gradient, candidate_VD, out=query_gradient[part])
        weighted = query if weight_N is None else query * weight_N[part].unsqueeze(1)
        item_gradient[1:].addmm_(gradient.T, weighted)
    return value_N
