"""FLASH4Rec: gated attention, a user-aware gate, a sparse mixture of experts and Top-K dropout (2023 preprint).

Equation numbers are those of the paper. This implementation differs from its text in these places:
- W_z, W_v and W_u have biases, except for the user's half of W_u, because the sum with the other half needs only one;
- Z has width `d_shared`, V and U have width `d_value`, as in Hua et al.; the paper uses k for all three widths;
- eq. 5 concatenates along features, as its shapes imply; the user's half of the product is computed once per user;
- with one expert per token, eq. 8 gives a constant gate of 1 and no gradient to the router. By default, the gate is
  therefore the chosen expert's share of the softmax over all experts, as in Switch Transformer, which the paper cites;
- eq. 14 divides by the dropped mass; inverted dropout requires the kept mass. With the causal objective, the factor is
  computed per query rather than per example, which would leak later events into earlier queries
  (`topk_dropout_scope`);
- eq. 16 lacks the logarithm, the minus sign and the exponential of its denominator; the cross-entropy here has them;
- the paper does not cover unknown users: they are user 0, whose vector is trained with `user_dropout`. Without it, the
  vector stays zero, and the gate of eq. 5 depends only on the items;
- there is an output projection after the gate (Hua et al. 2022, arXiv:2202.10447), pre-norm blocks, and dropout of
  embeddings and residual branches;
- the experts' two layers have no biases, as in Switch Transformer, and the router's hidden layer is a ReLU;
- `prediction_head: false` removes the two layers before the scores, which must learn from data that an item is similar
  to itself; sparse logs do not suffice for that. Input items are then scaled by sqrt(d), as in SASRec, and residual
  branches start at a tenth;
- `request_time` adds to each event a vector for the time that passes until the next item is asked for;
- `attribute_values` adds to each item's vector those of the words of its text.

Shape suffixes, besides those of base.py: S shared query/key width, E value and gate width, K candidates of a row or
experts of a token, N tokens, M pairs of a token and its expert, X experts, Y layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, TaskLoss, require
from seqrec.models.layers import BUCKETS, Dropout, asked_at, attend, attention_bias, draws, initialise, time_bucket
from seqrec.models.words import ReadsWords, WordOptions

ROUTING = ("balance", "busiest_expert", "idlest_expert", "router_entropy")  # eq. 11 without lambda, two shares, nats
Activation = Literal["silu", "sigmoid"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True, kw_only=True)
class FLASH4RecOptions(WordOptions):
    """Options of FLASH4Rec."""

    d_model: int = 64
    d_shared: int = 64  # width of Z, the common basis of queries and keys
    d_value: int = 128  # width of values and gate
    layers: int = 2
    dropout: float = 0.2  # dropout of embeddings and residual branches
    activation: Activation = "silu"  # sigma in eqs. 1, 4 and 5; the paper does not name it
    user_gate: bool = True  # false: without the user's half of eq. 5
    request_time: bool = False  # read the time of the request, which is the target's time in training and evaluation
    user_dropout: float = 0.0  # share of training sequences with the user replaced by the unknown user
    norm: Literal["pre", "post"] = "pre"
    prediction_head: bool = True  # false: the last block's normalised output is the query, better on sparse data
    heads: int = 0  # 0: gated attention; ablation: number of heads of plain attention, without the user
    experts: int = 4  # 1: ablation with one dense network and no router
    experts_per_token: int = 1
    d_expert: int = 128
    d_router: int = 64
    gate: Literal["softmax_then_topk", "topk_then_softmax"] = "softmax_then_topk"  # the latter: eqs. 8, 9
    jitter: float = 0.01  # eq. 7: scale the router's input by Uniform(1 - jitter, 1 + jitter)
    balance: float = 0.01  # weight of eq. 11
    topk_dropout: float = 0.1  # probability of dropping each of a row's largest weights
    topk_dropout_k: int = 5
    topk_dropout_scope: Literal["auto", "matrix", "row"] = "auto"  # see `rescaled`
    attention_dropout: float = 0.0  # ablation: plain dropout of attention weights instead of Top-K dropout

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "d_value", "d_expert", "d_router", "layers", "topk_dropout_k")
        self.at_least(0, "heads", "jitter", "balance")
        require(
            self.d_shared >= 2 and self.d_shared % 2 == 0, "d_shared must be even: rotary positions pair dimensions"
        )
        require(1 <= self.experts_per_token <= self.experts, "experts_per_token must be between 1 and experts")
        require(
            not (self.attention_dropout and self.topk_dropout),
            "attention_dropout takes the place of Top-K dropout: set topk_dropout to 0",
        )
        require(self.user_gate or not self.user_dropout, "user_dropout: no effect without user_gate; set it to 0")
        require(self.heads == 0 or not self.user_gate, "heads: plain attention has no gate; set user_gate to false")
        require(self.heads == 0 or self.d_model % (2 * self.heads) == 0, "heads: each needs an even share of d_model")
        require(not (self.request_time and self.masked), "request_time: needs objective causal or last")
        if self.heads:
            self.check_unused("heads selects plain attention", "d_shared", "d_value", "activation")
        if self.experts == 1:
            self.check_unused("one expert has no router", "d_router", "gate", "jitter", "balance")
        if self.topk_dropout == 0:
            self.check_unused("topk_dropout is 0", "topk_dropout_k", "topk_dropout_scope")

    @property
    def from_request(self) -> bool:
        return self.request_time

    @property
    def rescaled(self) -> str:
        """The scope of a rescaling factor of Top-K dropout: `row` (a query) or `matrix` (an example).

        The paper uses one factor per example. With the causal objective, that leaks later events into earlier queries
        in training, so `auto` means `row` there and `matrix` otherwise. An explicit `matrix` is respected.
        """
        if self.topk_dropout_scope != "auto":
            return self.topk_dropout_scope
        return "row" if self.objective == "causal" else "matrix"


def _normal(*shape: int) -> Tensor:
    """Return initial weights (..., inputs, outputs) that preserve the scale of the inputs."""
    return torch.empty(shape).normal_(std=shape[-2] ** -0.5)


def rotate(q_BLS: Tensor, k_BLS: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings, so that inner products depend only on the distance of positions (eq. 3)."""
    length, width = q_BLS.shape[-2:]
    steps = torch.arange(width // 2, device=q_BLS.device, dtype=torch.float32)
    angle = torch.arange(length, device=q_BLS.device, dtype=torch.float32)[:, None] * 10000.0 ** (-2 * steps / width)
    cos, sin = angle.cos().to(q_BLS.dtype), angle.sin().to(q_BLS.dtype)

    def rotated(x_BLS: Tensor) -> Tensor:
        first, second = x_BLS.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    return rotated(q_BLS), rotated(k_BLS)


def topk_dropout(weight_BLL: Tensor, real_BL: Tensor, k: int, p: float, scope: str) -> Tensor:
    """Drop each of a row's `k` largest weights with probability `p`, and rescale the others (eqs. 12-14).

    Args:
        weight_BLL: attention weights after the softmax.
        real_BL: queries that are not padding; padded rows are left out of all sums.
        k: number of candidates for dropping in each row.
        p: probability of dropping a candidate.
        scope: `matrix` rescales each example by one factor, `row` each row.
    """
    if p == 0:
        return weight_BLL
    with torch.no_grad():  # the mask is a constant (the paper's gradient block)
        wide = torch.promote_types(weight_BLL.dtype, torch.float32)  # in bf16, the difference of sums has no digits
        top_BLK, index_BLK = weight_BLL.topk(min(k, weight_BLL.shape[-1]), dim=-1)
        kept_BLK = torch.rand_like(top_BLK, dtype=wide) >= p
        mass_BL1 = weight_BLL.sum(-1, keepdim=True, dtype=wide) * real_BL.unsqueeze(-1)
        dropped_BL1 = (top_BLK * ~kept_BLK).sum(-1, keepdim=True, dtype=wide) * real_BL.unsqueeze(-1)
        if scope == "matrix":
            mass_BL1, dropped_BL1 = mass_BL1.sum(1, keepdim=True), dropped_BL1.sum(1, keepdim=True)
        factor_BL1 = (mass_BL1 / (mass_BL1 - dropped_BL1).clamp(min=1e-6)).to(weight_BLL.dtype)
        mask_BLL = factor_BL1.expand_as(weight_BLL).clone()
        mask_BLL.scatter_(-1, index_BLK, kept_BLK * factor_BL1)
    return weight_BLL * mask_BLL


def mix(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, real: Tensor, options: FLASH4RecOptions, training: bool
) -> Tensor:
    """Return softmax attention (eqs. 2, 3) over `value`; in training, with the dropout of `options`."""
    if not training or options.topk_dropout == 0:
        dropout = options.attention_dropout if training else 0.0
        query, key, value, bias = (x.unsqueeze(1) for x in (query, key, value, bias))  # one head
        return attend(query, key, value, bias, dropout).squeeze(1)
    weight = torch.baddbmm(bias, query, key.mT, alpha=query.shape[-1] ** -0.5).softmax(-1)
    weight = topk_dropout(weight, real, options.topk_dropout_k, options.topk_dropout, options.rescaled)
    return weight @ value


def grouped_linear(x_ME: Tensor, counts_X: Tensor, weight_XEF: Tensor) -> Tensor:
    """Return (M, F): each row times its expert's weight.

    Args:
        x_ME: rows sorted by expert.
        counts_X: rows of each expert.
        weight_XEF: weights of each expert.
    """
    if x_ME.is_cuda and torch.is_autocast_enabled("cuda"):  # where layer norm returns fp32
        x_ME = x_ME.to(torch.get_autocast_dtype("cuda"))
    dtypes = (torch.bfloat16,) if x_ME.is_cuda else (torch.bfloat16, torch.float32)
    aligned = all(width % 8 == 0 for width in weight_XEF.shape[1:])  # the kernel needs rows aligned to 16 bytes
    if aligned and x_ME.dtype in dtypes and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x_ME, weight_XEF.to(x_ME.dtype), offs=counts_X.cumsum(0).to(torch.int32))
    parts = zip(x_ME.split(counts_X.tolist()), weight_XEF, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


class GatedAttention(nn.Module):
    """Single-head gated attention with a user-aware gate (eqs. 1-6)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.options = options
        self.activation = ACTIVATIONS[options.activation]
        self.to_shared = nn.Linear(options.d_model, options.d_shared)
        self.scale = nn.Parameter(torch.ones(2, options.d_shared))  # row 0: queries, row 1: keys
        self.shift = nn.Parameter(torch.zeros(2, options.d_shared))
        self.to_value = nn.Linear(options.d_model, options.d_value)
        self.to_gate = nn.Linear(options.d_model, options.d_value)
        self.user_to_gate = nn.Linear(options.d_model, options.d_value, bias=False) if options.user_gate else None
        self.to_out = nn.Linear(options.d_value, options.d_model)

    def forward(self, x_BLD: Tensor, user_BD: Tensor, bias_BLL: Tensor, real_BL: Tensor, queries: slice) -> Tensor:
        """Return the output (B, Q, D) at the positions `queries`."""
        z_BLS = self.activation(self.to_shared(x_BLD))  # (1)
        q_BLS, k_BLS = rotate(z_BLS * self.scale[0] + self.shift[0], z_BLS * self.scale[1] + self.shift[1])
        value_BLE = self.activation(self.to_value(x_BLD))  # (4)
        gate_BLE = self.to_gate(x_BLD[:, queries])
        if self.user_to_gate is not None:
            gate_BLE = gate_BLE + self.user_to_gate(user_BD).unsqueeze(1)
        gate_BLE = self.activation(gate_BLE)  # (5)
        bias_BQL, real_BQ = bias_BLL[:, queries], real_BL[:, queries]
        mixed_BLE = mix(q_BLS[:, queries], k_BLS, value_BLE, bias_BQL, real_BQ, self.options, self.training)
        return self.to_out(gate_BLE * mixed_BLE)  # (6)


class RotaryAttention(nn.Module):
    """Multi-head attention with rotary positions, the ablation of gated attention (paper, table 3)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.options = options
        self.to_all = nn.Linear(options.d_model, 3 * options.d_model)
        self.to_out = nn.Linear(options.d_model, options.d_model)

    def forward(self, x_BLD: Tensor, _: Tensor, bias_BLL: Tensor, real_BL: Tensor, queries: slice) -> Tensor:
        """Return the output (B, Q, D) at the positions `queries`."""
        heads = self.options.heads
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1) for x in self.to_all(x_BLD).chunk(3, -1))
        bias, real = (x[:, queries].repeat_interleave(heads, 0) for x in (bias_BLL, real_BL))
        q, k = rotate(q, k)
        mixed = mix(q[:, queries], k, v, bias, real, self.options, self.training)  # (B * H, Q, K)
        return self.to_out(mixed.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of feed-forward experts; each token uses `experts_per_token` of them (eqs. 7-11)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.options = options
        self.router = nn.Sequential(
            nn.Linear(options.d_model, options.d_router), nn.ReLU(), nn.Linear(options.d_router, options.experts)
        )
        self.inner = nn.Parameter(_normal(options.experts, options.d_model, options.d_expert))
        self.outer = nn.Parameter(_normal(options.experts, options.d_expert, options.d_model))

    def forward(self, x_BLD: Tensor, real_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed outputs (B, L, D) and the layer's `ROUTING` (4,); outputs at padding are zero.

        A graph computes outputs at padding too, which nothing reads, and no `ROUTING`.
        """
        x_ND, real_N = x_BLD.flatten(0, 1), real_BL.flatten()
        logits_NX = self.router(self._jittered(x_ND))
        share_NX = logits_NX.T.contiguous().softmax(0).T  # on a CPU, ten times as fast as a softmax over rows of four
        gate_NK, expert_NK = self._gates(logits_NX, share_NX)
        if torch.compiler.is_exporting():
            mixed_ND = self._with_common_operators(x_ND, gate_NK, expert_NK)
            routing = x_ND.new_zeros(len(ROUTING))
        else:
            mixed_ND, counts_X = self._dispatch(x_ND, gate_NK, expert_NK, real_N)
            routing = self._routing(share_NX, counts_X, real_N)
        return mixed_ND.unflatten(0, x_BLD.shape[:2]), routing

    def _jittered(self, x_ND: Tensor) -> Tensor:
        epsilon = self.options.jitter
        if not self.training or epsilon == 0:
            return x_ND
        return x_ND * draws(x_ND).to(x_ND.dtype).mul_(epsilon / 32768).add_(1)  # (7)

    def _gates(self, logits_NX: Tensor, share_NX: Tensor) -> tuple[Tensor, Tensor]:
        k = self.options.experts_per_token
        if self.options.gate == "topk_then_softmax":
            top_NK, expert_NK = logits_NX.topk(k, dim=-1)  # (8)
            return top_NK.softmax(-1), expert_NK  # (9)
        if k == 1:
            return share_NX.max(-1, keepdim=True)
        gate_NK, expert_NK = share_NX.topk(k, dim=-1)
        return gate_NK / gate_NK.sum(-1, keepdim=True), expert_NK

    def _dispatch(self, x_ND: Tensor, gate_NK: Tensor, expert_NK: Tensor, real_N: Tensor) -> tuple[Tensor, Tensor]:
        """Sort copies of the tokens by expert, run each expert on its slice, and add up the results (eq. 10).

        Returns:
            The mixed outputs (N, D), zero at padding, and the tokens of each expert (X,).
        """
        experts, k = self.options.experts, self.options.experts_per_token
        expert_M, order_M = torch.where(real_N.unsqueeze(-1), expert_NK, experts).flatten().sort(stable=True)
        stop_X = torch.searchsorted(expert_M, torch.arange(1, experts + 1, device=x_ND.device))  # bincount would wait
        counts_X = stop_X.diff(prepend=stop_X.new_zeros(1))
        if not x_ND.is_cuda:  # skip padding, which is sorted last; on a GPU, waiting for the count would take longer
            order_M = order_M[: int(stop_X[-1])]
        expert_M, token_M = expert_M[: len(order_M)], order_M // k
        stop_X[-1:].fill_(len(order_M))  # the last expert also takes the padding that is left
        sizes_X = stop_X.diff(prepend=stop_X.new_zeros(1))
        hidden_ME = F.gelu(grouped_linear(x_ND.index_select(0, token_M), sizes_X, self.inner))
        computed_MD = grouped_linear(hidden_ME, sizes_X, self.outer)
        gate_M = gate_NK.flatten().index_select(0, order_M) * (expert_M < experts)
        weighted_MD = (computed_MD * gate_M.unsqueeze(-1)).to(x_ND.dtype)
        return torch.zeros_like(x_ND).index_add_(0, token_M, weighted_MD), counts_X

    def _with_common_operators(self, x_ND: Tensor, gate_NK: Tensor, expert_NK: Tensor) -> Tensor:
        """Return the mixed outputs (N, D) by operators that every runtime has."""
        expert_M, k = expert_NK.flatten(), expert_NK.shape[1]
        order_M = expert_M.argsort()
        sizes = (expert_M.unsqueeze(1) == torch.arange(self.options.experts)).sum(0).tolist()
        for size in sizes:
            torch._check(size >= 0)  # the exporter cannot know
        torch._check(sum(sizes) == expert_M.shape[0])
        x_MD = x_ND.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)[order_M]
        parts = zip(x_MD.split(sizes), self.inner, self.outer, strict=True)
        computed_MD = torch.cat([F.gelu(part_MD @ inner) @ outer for part_MD, inner, outer in parts])
        computed_NKD = computed_MD[order_M.argsort()].unflatten(0, (-1, k))
        return (computed_NKD * gate_NK.unsqueeze(-1)).sum(1)

    def _routing(self, share_NX: Tensor, counts_X: Tensor, real_N: Tensor) -> Tensor:
        number = real_N.sum().clamp(min=1)
        probability_X = (share_NX * real_N.unsqueeze(-1)).sum(0) / number
        load_X = counts_X / counts_X.sum().clamp(min=1)
        balance = self.options.experts * (load_X * probability_X).sum()  # (11)
        entropy = torch.special.entr(share_NX.detach()).sum(-1).masked_fill(~real_N, 0.0).sum() / number
        return torch.stack([balance, load_X.max(), load_X.min(), entropy])


class FeedForward(nn.Module):
    """One network for all tokens, the ablation of the experts (paper, table 3)."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.inner = nn.Linear(options.d_model, options.d_expert)
        self.outer = nn.Linear(options.d_expert, options.d_model)

    def forward(self, x_BLD: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, L, D), and zeros for `ROUTING`."""
        return self.outer(F.gelu(self.inner(x_BLD))), x_BLD.new_zeros(len(ROUTING))


class Block(nn.Module):
    """Gated attention and experts, each with a residual connection and layer norm."""

    def __init__(self, options: FLASH4RecOptions) -> None:
        super().__init__()
        self.pre_norm = options.norm == "pre"
        self.attention = RotaryAttention(options) if options.heads else GatedAttention(options)
        self.norm_attention = nn.LayerNorm(options.d_model)
        self.experts = Experts(options) if options.experts > 1 else FeedForward(options)
        self.norm_experts = nn.LayerNorm(options.d_model)
        self.dropout = Dropout(options.dropout)

    def forward(
        self, x_BLD: Tensor, user_BD: Tensor, bias_BLL: Tensor, real_BL: Tensor, queries: slice
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output at the positions `queries`, and its `ROUTING`."""
        source_BLD = self.norm_attention(x_BLD) if self.pre_norm else x_BLD
        x_BLD = x_BLD[:, queries] + self.dropout(self.attention(source_BLD, user_BD, bias_BLL, real_BL, queries))
        if not self.pre_norm:
            x_BLD = self.norm_attention(x_BLD)
        mixed_BLD, routing = self.experts(self.norm_experts(x_BLD) if self.pre_norm else x_BLD, real_BL[:, queries])
        x_BLD = x_BLD + self.dropout(mixed_BLD)
        return x_BLD if self.pre_norm else self.norm_experts(x_BLD), routing


class FLASH4Rec(ReadsWords):
    """Blocks of user-aware gated attention and sparse experts over the user's items."""

    Options = FLASH4RecOptions
    options: FLASH4RecOptions
    objectives = frozenset({"causal", "last", "cloze"})
    reads_events = True
    undecayed = ("attention.scale", "attention.shift")  # gains and offsets of queries and keys, stored as matrices

    def __init__(self, options: FLASH4RecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        d_model = options.d_model
        self.users = nn.Embedding(catalogue.num_users + 1, d_model) if options.user_gate else None
        self.by_time = nn.Embedding(BUCKETS + 1, d_model) if options.request_time else None
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(d_model) if options.norm == "pre" else nn.Identity()
        self.head = nn.Sequential()
        if options.prediction_head:
            self.head.extend(
                [nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model), nn.Linear(d_model, d_model)]
            )
        initialise(self)
        with torch.no_grad():
            if self.users is not None:
                self.users.weight[0] = 0
            for part in self.modules():
                if isinstance(part, nn.Linear):
                    part.weight.copy_(_normal(part.in_features, part.out_features).T)
            for name, weight in self.blocks.named_parameters():
                if not options.prediction_head and name.endswith(("to_out.weight", "outer", "outer.weight")):
                    weight.mul_(0.1)

    @classmethod
    def needs_of(cls, options: FLASH4RecOptions) -> frozenset[str]:
        read = {"user": options.user_gate, "times": options.request_time}
        return super().needs_of(options) | {name for name, wanted in read.items() if wanted}

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        return self._encode(batch, last)[0]

    def _encode(self, batch: Batch, last: bool) -> tuple[Tensor, Tensor]:
        """Return queries, and each layer's `ROUTING`."""
        real_BL = batch.items != PAD
        bias_BLL = attention_bias(batch.items, causal=self.options.objective == "causal")
        x_BLD = self.embed(batch.items)
        if not self.options.prediction_head:
            x_BLD = x_BLD * self.options.d_model**0.5
        if self.by_time is not None:
            x_BLD = x_BLD + self.by_time(time_bucket(asked_at(batch.times) - batch.times))
        x_BLD = self.dropout(x_BLD)
        user_BD = self.users(self._without_some(batch.user)) if self.users is not None else x_BLD[:, -1]
        routings = []
        for number, block in enumerate(self.blocks, start=1):
            only_last = last and number == self.options.layers  # earlier layers compute its keys and values
            queries = slice(-1, None) if only_last else slice(None)
            x_BLD, routing = block(x_BLD, user_BD, bias_BLL, real_BL, queries)
            routings.append(routing)
        return self.head(self.norm(x_BLD)), torch.stack(routings)

    def _without_some(self, user_B: Tensor) -> Tensor:
        """Return the users; in training, a share of them replaced by the unknown user."""
        p = self.options.user_dropout
        if not self.training or p == 0:
            return user_B
        return user_B * (torch.rand(user_B.shape, device=user_B.device) >= p)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; adds the load-balancing term, and figures of the routing."""
        query_BLD, routing_YR = self._encode(batch, last=False)
        terms = {"task": task(query_BLD).sum()}
        if self.options.experts > 1:
            balance_Y, busiest_Y, idlest_Y, entropy_Y = routing_YR.unbind(1)
            terms["balance"] = self.options.balance * balance_Y.mean()  # (11)
            figures = (busiest_Y.max(), idlest_Y.min(), entropy_Y.mean())
            terms |= {f"figure/{name}": value.detach() for name, value in zip(ROUTING[1:], figures, strict=True)}
        return terms
