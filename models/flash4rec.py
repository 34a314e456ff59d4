"""FLASH4Rec: gated attention, a user-aware gate, a sparse mixture of experts and Top-K dropout (2023 preprint).

Equation numbers are the paper's. It differs from the printed text in these places:
- eq. 5 concatenates along features, as its shapes say; the user's half of the product is computed once per user;
- eq. 8 with one expert gives the constant gate 1, hence no gradient to the router: by default the gate is the
  chosen expert's share of the softmax over all experts (Switch Transformer, the source it cites);
- eq. 14 divides by the dropped mass; inverted dropout needs the kept mass;
- an output projection after the gate (Hua et al. 2022, arXiv:2202.10447) and pre-norm blocks; dropout on embeddings
  and residuals.

Shape suffixes, besides those of base.py: S shared query/key width, E value and gate width, N tokens, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.base import PAD, Batch, Catalogue, Options, SequenceModel, TaskLoss, check
from models.layers import INIT_STD, attention_bias, initialise

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True, kw_only=True)
class FLASH4RecOptions(Options):
    """Options of FLASH4Rec."""

    d_model: int = 64
    d_shared: int = 64  # width of Z, from which queries and keys are made
    d_value: int = 128  # width of values and gate
    layers: int = 2
    dropout: float = 0.2  # of embeddings and residual branches
    activation: str = "silu"  # silu | sigmoid: the unnamed sigma of eqs. 1, 4, 5
    user_gate: bool = True  # False drops the user's half of eq. 5
    norm: str = "pre"  # pre | post
    experts: int = 4
    experts_per_token: int = 1
    d_expert: int = 128
    d_router: int = 64
    gate: str = "softmax_then_topk"  # | topk_then_softmax: eqs. 8 and 9 to the letter
    jitter: float = 0.01  # eq. 7: the router's input is scaled by Uniform(1 - jitter, 1 + jitter)
    balance: float = 0.01  # weight of eq. 11
    topk_dropout: float = 0.1  # probability of dropping each of a row's largest weights
    topk_dropout_k: int = 5
    topk_dropout_scope: str = "matrix"  # matrix: one rescaling per example | row: one per query

    def __post_init__(self) -> None:
        super().__post_init__()
        check(min(self.d_model, self.layers, self.d_value, self.d_expert) >= 1, "widths and layers: at least 1")
        check(self.d_shared >= 2 and self.d_shared % 2 == 0, "d_shared must be even: rotary positions pair dimensions")
        check(0 <= self.dropout < 1 and 0 <= self.topk_dropout < 1, "dropout, topk_dropout: at least 0 and under 1")
        check(self.activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}")
        check(self.norm in ("pre", "post"), "norm must be pre or post")
        check(1 <= self.experts_per_token <= self.experts, "experts_per_token must be between 1 and experts")
        check(self.gate in ("softmax_then_topk", "topk_then_softmax"), "gate: softmax_then_topk or topk_then_softmax")
        check(self.topk_dropout_k >= 1, "topk_dropout_k must be at least 1")
        check(self.topk_dropout_scope in ("matrix", "row"), "topk_dropout_scope must be matrix or row")
        check(self.jitter >= 0 and self.balance >= 0, "jitter and balance must be at least 0")


def rotate(x_BLS: Tensor) -> Tensor:
    """Rotate pairs of dimensions by the position (RoPE), so that inner products depend on distance alone (eq. 3)."""
    length, width = x_BLS.shape[-2:]
    steps = torch.arange(width // 2, device=x_BLS.device, dtype=torch.float32)
    angle = torch.arange(length, device=x_BLS.device, dtype=torch.float32)[:, None] * 10000.0 ** (-2 * steps / width)
    cos, sin = angle.cos().to(x_BLS.dtype), angle.sin().to(x_BLS.dtype)
    first, second = x_BLS.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def topk_dropout(weight_BLL: Tensor, real_BL: Tensor, k: int, p: float, scope: str) -> Tensor:
    """Drop each of a row's `k` largest weights with probability `p`, then restore the kept mass (eqs. 12-14).

    Args:
        weight_BLL: attention after the softmax.
        real_BL: which queries are no padding; padded rows count in no sum.
        k: candidates for dropping in each row.
        p: probability of dropping a candidate.
        scope: `matrix` rescales an example by one factor, `row` every row by its own.
    """
    if p == 0:
        return weight_BLL
    with torch.no_grad():  # the paper's gradient block: the mask is a constant
        top_BLK, index_BLK = weight_BLL.topk(min(k, weight_BLL.shape[-1]), dim=-1)
        kept_BLK = torch.rand_like(top_BLK) >= p
        dropped_BL1 = (top_BLK * ~kept_BLK).sum(-1, keepdim=True) * real_BL.unsqueeze(-1)
        before_BL1 = real_BL.unsqueeze(-1).to(weight_BLL.dtype)  # a row of a softmax sums to 1
        if scope == "matrix":
            dropped_BL1, before_BL1 = dropped_BL1.sum(1, keepdim=True), before_BL1.sum(1, keepdim=True)
        factor_BL1 = before_BL1 / (before_BL1 - dropped_BL1).clamp(min=1e-6)
        mask_BLL = factor_BL1.expand_as(weight_BLL).clone()
        mask_BLL.scatter_(-1, index_BLK, kept_BLK * factor_BL1)
    return weight_BLL * mask_BLL


class GatedAttention(nn.Module):
    """Single-head gated attention with a gate that knows the user (eqs. 1-6)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.options = options
        self.activation = ACTIVATIONS[options.activation]
        self.to_shared = nn.Linear(options.d_model, options.d_shared)
        self.scale = nn.Parameter(torch.ones(2, options.d_shared))  # row 0 makes queries, row 1 keys
        self.shift = nn.Parameter(torch.zeros(2, options.d_shared))
        self.to_value = nn.Linear(options.d_model, options.d_value)
        self.to_gate = nn.Linear(options.d_model, options.d_value)
        self.user_to_gate = nn.Linear(options.d_model, options.d_value, bias=False) if options.user_gate else None
        self.to_out = nn.Linear(options.d_value, options.d_model)

    def forward(self, x_BLD: Tensor, user_BD: Tensor, bias_BLL: Tensor, real_BL: Tensor, queries: slice) -> Tensor:
        """Return the layer's output at the positions `queries` alone."""
        z_BLS = self.activation(self.to_shared(x_BLD))  # (1)
        q_BLS, k_BLS = rotate(z_BLS * self.scale[0] + self.shift[0]), rotate(z_BLS * self.scale[1] + self.shift[1])
        value_BLE = self.activation(self.to_value(x_BLD))  # (4)
        gate_BLE = self.to_gate(x_BLD[:, queries])
        if self.user_to_gate is not None:
            gate_BLE = gate_BLE + self.user_to_gate(user_BD).unsqueeze(1)
        gate_BLE = self.activation(gate_BLE)  # (5)
        mixed_BLE = self._mix(q_BLS[:, queries], k_BLS, value_BLE, bias_BLL[:, queries], real_BL[:, queries])
        out: Tensor = self.to_out(gate_BLE * mixed_BLE)  # (6)
        return out

    def _mix(self, q: Tensor, k: Tensor, value_BLE: Tensor, bias: Tensor, real: Tensor) -> Tensor:
        options = self.options
        if not self.training or options.topk_dropout == 0:
            return F.scaled_dot_product_attention(q, k, value_BLE, attn_mask=bias)
        score = torch.baddbmm(bias, q, k.mT, alpha=options.d_shared**-0.5)  # (3)
        weight = topk_dropout(
            score.softmax(-1), real, options.topk_dropout_k, options.topk_dropout, options.topk_dropout_scope
        )
        return weight @ value_BLE


class Experts(nn.Module):
    """A mixture of feed-forward experts, each token computed by `experts_per_token` of them (eqs. 7-11)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.options = options
        self.router = nn.Sequential(
            nn.Linear(options.d_model, options.d_router), nn.GELU(), nn.Linear(options.d_router, options.experts)
        )
        self.inner = nn.Parameter(torch.empty(options.experts, options.d_model, options.d_expert).normal_(std=INIT_STD))
        self.inner_bias = nn.Parameter(torch.zeros(options.experts, options.d_expert))
        self.outer = nn.Parameter(torch.empty(options.experts, options.d_expert, options.d_model).normal_(std=INIT_STD))
        self.outer_bias = nn.Parameter(torch.zeros(options.experts, options.d_model))

    def forward(self, x_BLD: Tensor, real_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed outputs (B, L, D), zero at padding, and the balance term of eq. 11 without its weight."""
        x_ND, real_N = x_BLD.flatten(0, 1), real_BL.flatten()
        logits_NX = self.router(self._jittered(x_ND))
        gate_NK, expert_NK = self._gates(logits_NX)
        mixed_ND = self._dispatch(x_ND, gate_NK, expert_NK, real_N)
        return mixed_ND.unflatten(0, x_BLD.shape[:2]), self._balance(logits_NX, expert_NK, real_N)

    def _jittered(self, x_ND: Tensor) -> Tensor:
        epsilon = self.options.jitter
        if not self.training or epsilon == 0:
            return x_ND
        return x_ND * torch.empty_like(x_ND).uniform_(1 - epsilon, 1 + epsilon)  # (7)

    def _gates(self, logits_NX: Tensor) -> tuple[Tensor, Tensor]:
        k = self.options.experts_per_token
        if self.options.gate == "topk_then_softmax":
            top_NK, expert_NK = logits_NX.topk(k, dim=-1)  # (8)
            return top_NK.softmax(-1), expert_NK  # (9)
        gate_NK, expert_NK = logits_NX.softmax(-1).topk(k, dim=-1)
        return gate_NK if k == 1 else gate_NK / gate_NK.sum(-1, keepdim=True), expert_NK

    def _dispatch(self, x_ND: Tensor, gate_NK: Tensor, expert_NK: Tensor, real_N: Tensor) -> Tensor:
        """Sort token copies by expert, run each expert on its slice, add the results where they belong (eq. 10)."""
        experts, k = self.options.experts, self.options.experts_per_token
        expert_M = torch.where(
            real_N.unsqueeze(-1), expert_NK, experts
        ).flatten()  # padding sorts last, is not computed
        order_M = expert_M.argsort(stable=True)
        counts = torch.bincount(expert_M, minlength=experts + 1).tolist()
        order_M = order_M[: len(order_M) - counts.pop()]
        token_M = order_M // k
        slices = x_ND[token_M].split(counts)
        weights = zip(self.inner, self.inner_bias, self.outer, self.outer_bias, strict=True)
        computed_MD = torch.cat(
            [
                torch.addmm(outer_bias, F.gelu(torch.addmm(inner_bias, part, inner)), outer)
                for part, (inner, inner_bias, outer, outer_bias) in zip(slices, weights, strict=True)
            ]
        )
        weighted_MD = computed_MD * gate_NK.flatten()[order_M].unsqueeze(-1)
        return torch.zeros_like(x_ND).index_add(0, token_M, weighted_MD.to(x_ND.dtype))

    def _balance(self, logits_NX: Tensor, expert_NK: Tensor, real_N: Tensor) -> Tensor:
        real_N1 = real_N.unsqueeze(-1)
        count = real_N.sum().clamp(min=1)
        probability_X = (logits_NX.softmax(-1) * real_N1).sum(0) / count
        chosen_NX = torch.zeros_like(logits_NX).scatter(1, expert_NK, 1.0)
        share_X = (chosen_NX * real_N1).sum(0) / (count * self.options.experts_per_token)
        return self.options.experts * (share_X.detach() * probability_X).sum()  # (11)


class Block(nn.Module):
    """Gated attention, then experts, each with a residual and a normalisation."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.pre_norm = options.norm == "pre"
        self.attention, self.norm_attention = GatedAttention(options), nn.LayerNorm(options.d_model)
        self.experts, self.norm_experts = Experts(options), nn.LayerNorm(options.d_model)
        self.dropout = nn.Dropout(options.dropout)

    def forward(
        self, x_BLD: Tensor, user_BD: Tensor, bias_BLL: Tensor, real_BL: Tensor, queries: slice
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output at the positions `queries` alone, and its balance term."""
        source_BLD = self.norm_attention(x_BLD) if self.pre_norm else x_BLD
        x_BLD = x_BLD[:, queries] + self.dropout(self.attention(source_BLD, user_BD, bias_BLL, real_BL, queries))
        if not self.pre_norm:
            x_BLD = self.norm_attention(x_BLD)
        mixed_BLD, balance = self.experts(self.norm_experts(x_BLD) if self.pre_norm else x_BLD, real_BL[:, queries])
        x_BLD = x_BLD + self.dropout(mixed_BLD)
        return x_BLD if self.pre_norm else self.norm_experts(x_BLD), balance


class FLASH4Rec(SequenceModel):
    """A stack of gated attention and sparse experts over items, gated by the user."""

    Options = FLASH4RecOptions
    options: FLASH4RecOptions
    objectives = frozenset({"causal", "last", "cloze"})
    needs = frozenset({"user"})

    def __init__(self, options: FLASH4RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model = options.d_model
        mask = options.objective == "cloze"  # one more row
        self.items = nn.Embedding(catalogue.num_items + 1 + mask, d_model, padding_idx=PAD)
        self.users = nn.Embedding(catalogue.num_users + 1, d_model) if options.user_gate else None
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(d_model) if options.norm == "pre" else nn.Identity()
        self.head = nn.Sequential(
            nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model), nn.Linear(d_model, d_model)
        )
        initialise(self)

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`."""
        return self._encode(batch, last)[0]

    def _encode(self, batch: Batch, last: bool) -> tuple[Tensor, Tensor]:
        real_BL = batch.items != PAD
        bias_BLL = attention_bias(batch.items, causal=self.options.objective == "causal")
        x_BLD = self.dropout(self.items(batch.items))
        user_BD = self.users(batch.user) if self.users is not None else x_BLD[:, -1]
        balances = []
        for number, block in enumerate(self.blocks, start=1):
            only_last = last and number == self.options.layers  # earlier layers feed its keys and values
            queries = slice(-1, None) if only_last else slice(None)
            x_BLD, balance = block(x_BLD, user_BD, bias_BLL, real_BL, queries)
            balances.append(balance)
        return self.head(self.norm(x_BLD)), torch.stack(balances).mean()

    def item_vectors(self) -> Tensor:
        """See `SequenceModel.item_vectors`."""
        return self.items.weight[: self.catalogue.num_items + 1]

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; adds the load-balancing term."""
        query_BLD, balance = self._encode(batch, last=False)
        return {"task": task(query_BLD).sum(), "balance": self.options.balance * balance}
