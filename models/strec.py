"""STRec: sparse Transformer for sequential recommendation (Li et al., RecSys 2023).

Layer l computes only k_l rows, and k_l decreases with l. The events that get a row are sampled once per sequence, by
the time since each event. Only the last event's output is trained and used, so training examples are prefixes
(objective `last`), and attention is bidirectional.

Stage 1 (phase `soft`) trains backbone and sampler together: all rows are computed, and keys are weighted by their
probability of being sampled. Stage 2 (phase `hard`) freezes the sampler and trains with gathered rows, as in serving.

Differs from the paper and its code in these places; the last five are options:
- short sequences are kept: padding ranks last, and layers that would sample more rows than exist compute all rows;
- the output is row 0, that of the last event, which is always sampled first; the code uses the last row;
- the loss is cross-entropy over all items, as in the code; the paper calls eq. 14 binary, but it is a softmax;
- noise at inference is a fixed draw per (item, position, last item), so that rankings do not depend on the batch;
- the sampler is initialised as an increasing function of time, which training may change;
- noise is standard normal, as in the code; the paper says uniform (`noise`);
- the sampler reads times as asinh(t / 60 s), because raw seconds saturate it (`transform`);
- keys are weighted by adding log(S + 1e-9); the paper adds 1e8 (M - 1), which has no useful gradient (`mask`);
- the offsets alpha are computed from k by running quantiles of the scores; with the code's constants, deep layers are
  trained much denser than they are run (`alpha`);
- positions count back from the last event; by default, attention weights have no dropout (`attention_dropout`).

Shape suffixes, besides those of base.py: Q queries, H heads, K width of a head, G grid of quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqrec.models.base import PAD, Batch, Catalogue, Objective, SequenceModel, TaskLoss, require
from seqrec.models.efficient_attention import EFFICIENT
from seqrec.models.layers import AttentionOptions, Dropout, attend, initialise

SPARSITY = 0.69  # the best in the paper
SPARSITIES = (0.0, 0.42, 0.58, 0.69, 0.77, 0.9, 0.98)  # at which a trained model can be evaluated
OFFICIAL_ALPHA = (-0.2, -0.2, -0.3, -0.3, -0.5, -0.5, -0.7, -0.7)  # constants of the paper's code for its 8 layers
LITERAL_SCALE = 1e8  # C of eq. 12, as in the code
LOG_FLOOR = 1e-9  # added to S before the logarithm
FORCED = 1e4  # larger than any score, which is a z-score plus noise
GRID = 101  # points of a running quantile function
QUANTILE_RATE = 0.05  # weight of a new batch in the running quantiles
NOISE_TABLE = 65_536
MINUTE = 60.0
NORM_EPS = 1e-12  # as in the paper's code; initial embeddings are small
SCORE_EPS = 1e-6
EVERY_ROW = slice(None)
SAMPLER_OPTIONS = (
    *("k", "sparsity", "transform", "activation", "noise", "noise_seed"),
    *("mask", "temperature", "alpha", "hash_bins"),
)


@dataclass(frozen=True, kw_only=True)
class STRecOptions(AttentionOptions):
    """Options of STRec."""

    objective: Objective = "last"
    # only full works with sampling
    attention: Literal["full", "linformer", "informer", "longformer", "bigbird", "reformer", "flash", "autoformer"] = (
        "full"
    )
    # linformer: projected length | informer, autoformer: factor of log n | longformer: window | bigbird: window, and
    # random keys | reformer: half the buckets | flash: length of a chunk
    attention_size: int = 16
    sampling: Literal["time", "position", "random", "none"] = "time"  # time: since each event; none: all rows
    k: tuple[int, ...] = ()  # rows of each layer, not increasing; empty: constant by `sparsity`, 1 in the last
    sparsity: float | None = None  # k = round(length (1 - sparsity)); 0.69 unless `k` is given
    transform: Literal["asinh", "log1p", "raw"] = "asinh"  # transform of times in seconds
    activation: Literal["tanh", "relu"] = "tanh"  # activation of the sampler
    noise: Literal["normal", "uniform", "logistic", "none"] = "normal"  # added to z-scores
    noise_seed: int = 0  # seed of the noise at inference
    mask: Literal["log", "literal"] = "log"  # soft mask; literal: eq. 12 as printed
    temperature: float = 0.01  # tau of eq. 9
    alpha: Literal["calibrated", "official"] = "calibrated"  # official: the constants of the paper's code
    hash_bins: int = 0  # number of steps of the function that replaces the sampler after stage 1; 0: keep it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "attention_size")
        require(self.temperature > 0, "temperature must be positive")
        require(self.hash_bins == 0 or 2 <= self.hash_bins < GRID, f"hash_bins must be 0 or from 2 to {GRID - 1}")
        self._check_sampling()

    def _check_sampling(self) -> None:
        sampled = self.sampling != "none"
        if not sampled:
            self.check_unused("sampling is none", *SAMPLER_OPTIONS)
        if self.sampling == "random":
            self.check_unused("sampling is random", "transform", "activation", "hash_bins")
        if self.attention == "full":
            self.check_unused("attention is full", "attention_size")
        require(not sampled or self.attention == "full", "attention other than full needs sampling: none")
        require(
            not sampled or self.layers >= 2,
            "layers: sampling needs at least 2, because the first layer reads every event",
        )
        require(self.sampling != "random" or self.noise != "none", "noise must not be none with sampling: random")
        require(not self.k or self.sparsity is None, "k and sparsity exclude each other")
        require(not self.k or len(self.k) == self.layers, f"k needs one entry for each of the {self.layers} layers")
        require(all(1 <= k <= self.length for k in self.k), "k must lie between 1 and length")
        require(list(self.k) == sorted(self.k, reverse=True), "k must not increase from layer to layer")
        require(self.sparsity is None or 0 <= self.sparsity < 1, "sparsity must be at least 0 and under 1")
        require(
            self.alpha == "calibrated" or self.layers == len(OFFICIAL_ALPHA),
            "alpha: official needs 8 layers, because its values are published for 8 only",
        )

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows that each layer computes for a full sequence."""
        if self.k:
            return tuple(self.k)
        if self.attention != "full":
            return (self.length,) * self.layers
        sparsity = 0.0 if self.sampling == "none" else SPARSITY if self.sparsity is None else self.sparsity
        return (max(1, round(self.length * (1 - sparsity))),) * (self.layers - 1) + (1,)


class Attention(nn.Module):
    """Scaled dot-product attention from some rows to all input rows of a layer (eq. 3)."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(d_model, 3 * d_model)  # d_model rows of queries, then each head's keys and values
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, query_BQD: Tensor, source_BLD: Tensor, bias: Tensor | None) -> Tensor:
        """Return (B, Q, D); `bias` broadcasts to (B, H, Q, L): bool, True where visible, or float, added to logits."""
        d_model, (weight, shift) = query_BQD.shape[-1], (self.project.weight, self.project.bias)
        if query_BQD is source_BLD:
            q_BQD, key_value = F.linear(source_BLD, weight, shift).split([d_model, 2 * d_model], dim=-1)
            mixed_BQD = self._mix(q_BQD, key_value, bias)
        else:
            q_BQD = F.linear(query_BQD, weight[:d_model], shift[:d_model])
            # with few queries, keys and values are the largest tensors; without gradients, compute half at a time
            few = 2 * query_BQD.shape[1] < source_BLD.shape[1]
            parts = 2 if few and self.heads % 2 == 0 and not torch.is_grad_enabled() else 1
            slices = zip(
                weight[d_model:].chunk(parts), shift[d_model:].chunk(parts), q_BQD.chunk(parts, -1), strict=True
            )
            mixed = [self._mix(q, F.linear(source_BLD, rows, shifts), bias) for rows, shifts, q in slices]
            mixed_BQD = mixed[0] if parts == 1 else torch.cat(mixed, -1)
        return self.to_out(mixed_BQD)

    def _mix(self, q_BQE: Tensor, key_value: Tensor, bias: Tensor | None) -> Tensor:
        width = self.to_out.in_features // self.heads
        q_BHQK = q_BQE.view(*q_BQE.shape[:2], -1, width).transpose(1, 2)
        k_BHLK, v_BHLK = key_value.view(*key_value.shape[:2], -1, 2, width).transpose(1, 2).unbind(3)
        dropout = self.dropout if self.training else 0.0
        if bias is None or bias.dtype == torch.bool:
            mixed_BHQK = attend(q_BHQK, k_BHLK, v_BHLK, bias, dropout)
        else:  # fused kernels have no gradient for masks
            logits = q_BHQK @ k_BHLK.mT * width**-0.5 + bias
            mixed_BHQK = F.dropout(logits.softmax(-1), dropout) @ v_BHLK
        return mixed_BHQK.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention and a point-wise network, each followed by a residual connection and layer norm (eqs. 3 and 4).

    The two parts are called separately, so that a layer's input is freed before the point-wise network runs.
    """

    def __init__(self, options: STRecOptions) -> None:
        super().__init__()
        d_model = options.d_model
        if options.attention == "full":
            self.attention: nn.Module = Attention(d_model, options.heads, options.attention_dropout)
        else:
            efficient = EFFICIENT[options.attention]
            self.attention = efficient(d_model, options.heads, options.length, options.attention_size)
        self.norm_attention = nn.LayerNorm(d_model, NORM_EPS)
        self.inner = nn.Linear(d_model, 4 * d_model)
        self.outer = nn.Linear(4 * d_model, d_model)
        self.norm = nn.LayerNorm(d_model, NORM_EPS)
        self.dropout = Dropout(options.dropout)

    def attend(self, source_BLD: Tensor, rows: slice | Tensor, bias: Tensor | None) -> Tensor:
        """Return (B, Q, D): the `rows` of the input, a slice or indices (B, Q), after attention to all rows."""
        if isinstance(rows, Tensor):
            query_BQD = source_BLD.gather(1, rows.unsqueeze(-1).expand(-1, -1, source_BLD.shape[2]))
        else:
            query_BQD = source_BLD if rows == EVERY_ROW else source_BLD[:, rows]
        return self.norm_attention(query_BQD + self.dropout(self.attention(query_BQD, source_BLD, bias)))

    def transform(self, x_BQD: Tensor) -> Tensor:
        """Return the point-wise network's output (B, Q, D)."""
        return self.norm(x_BQD + self.dropout(self.outer(F.gelu(self.inner(x_BQD)))))


class Sampler(nn.Module):
    """Scores events for sampling: a function of the time since each event, standardised within the sequence (eq. 5).

    Running quantiles of scores, and of times if there is a step function, are buffers, so that they are saved.
    """

    levels: Tensor  # (G,) 0 .. 1
    scores: Tensor  # (G,) quantiles of the scores, without last events
    times: Tensor  # (G,) quantiles of the times
    edges: Tensor  # (bins - 1,) times at which the step function changes
    steps: Tensor  # (bins,) its values
    table: Tensor  # (NOISE_TABLE,) noise at inference

    def __init__(self, options: STRecOptions) -> None:
        super().__init__()
        self.options = options
        if options.sampling != "random":
            self.inner = nn.Linear(1, 32)
            self.outer = nn.Linear(32, 1)
            with torch.no_grad():  # positive weights give an increasing function of time
                self.inner.weight.abs_()
                self.outer.weight.abs_()
        levels_G = torch.linspace(0, 1, GRID)
        self.register_buffer("levels", levels_G, persistent=False)
        start_G = torch.special.ndtri(levels_G.clamp(0.5 / GRID, 1 - 0.5 / GRID)) * 2**0.5
        self.register_buffer("scores", start_G)  # of the sum of two standard normals, until the first batch
        generator = torch.Generator().manual_seed(options.noise_seed)
        self.register_buffer("table", self._draw(torch.rand(NOISE_TABLE, generator=generator)), persistent=False)
        if options.hash_bins:
            self.register_buffer("times", -torch.logspace(8, 0, GRID))  # a second to three years, until the first batch
            self.register_buffer("edges", torch.zeros(options.hash_bins - 1))
            self.register_buffer("steps", torch.zeros(options.hash_bins))
            self.fit_steps()

    def forward(self, batch: Batch, real_BL: Tensor | None, steps: bool = False) -> Tensor:
        """Return scores (B, L), highest for the last event and lowest for padding; `real_BL` None: no padding.

        With `steps`, the step function replaces the network.
        """
        score_BL = self._noise(batch)
        if self.options.sampling != "random":
            with torch.autocast(score_BL.device.type, enabled=False):  # bf16 is too coarse for scores
                times_BL = self._times(batch)
                relevance_BL = self.steps[torch.bucketize(times_BL, self.edges)] if steps else self.relevance(times_BL)
                score_BL = score_BL + _standardised(relevance_BL, real_BL)
        if real_BL is not None:
            score_BL = score_BL.masked_fill(~real_BL, -2 * FORCED)
        score_BL[:, -1] = FORCED
        return score_BL

    def relevance(self, times: Tensor) -> Tensor:
        """Return the network's value for `times` (...), seconds relative to the last event."""
        hidden = self.inner(_transformed(times, self.options.transform).unsqueeze(-1))
        hidden = torch.tanh(hidden) if self.options.activation == "tanh" else torch.relu(hidden)
        return self.outer(hidden).squeeze(-1)

    @torch.no_grad()
    def measure(self, batch: Batch, score_BL: Tensor, real_BL: Tensor) -> None:
        """Update the running quantiles with a batch of stage 1."""
        counted_BL = real_BL.clone()
        counted_BL[:, -1] = False
        self._follow(self.scores, score_BL, counted_BL)
        if self.options.hash_bins:
            self._follow(self.times, self._times(batch), counted_BL)

    def _times(self, batch: Batch) -> Tensor:
        if self.options.sampling == "time":
            return batch.times.to(self.scores.dtype)
        return -MINUTE * _places(batch).to(self.scores.dtype).expand_as(batch.times)  # as if one event a minute

    def _follow(self, running_G: Tensor, value_BL: Tensor, counted_BL: Tensor) -> None:
        if not len(value_BL):  # one of several processes may get no rows
            return
        seen_G = value_BL.detach().float().masked_fill(~counted_BL, torch.nan).flatten().nanquantile(self.levels)
        running_G.lerp_(torch.where(seen_G.isnan(), running_G, seen_G), QUANTILE_RATE)

    def soft_mask(self, score_BL: Tensor, real_BL: Tensor, layer: int) -> Tensor:
        """Return S_l (B, L) of eq. 9 for the rows of `layer`, counted from 1."""
        if self.options.alpha == "official":
            alpha = torch.full_like(score_BL[:, :1], OFFICIAL_ALPHA[layer - 1])
        else:
            alpha = -self._threshold(real_BL.sum(1, keepdim=True), self.options.rows[layer - 1])
        return torch.sigmoid((score_BL + alpha) / self.options.temperature)

    def _threshold(self, length_B1: Tensor, k: int) -> Tensor:
        """Return the score (B, 1) that, apart from the last event, k - 1 events of a sequence exceed on average."""
        level_B1 = 1 - (k - 1) / (length_B1 - 1).clamp(min=1).to(self.scores.dtype)
        place_B1 = level_B1.clamp(min=0) * (GRID - 1)
        below_B1 = place_B1.long().clamp(max=GRID - 2)
        score_B1 = torch.lerp(self.scores[below_B1], self.scores[below_B1 + 1], place_B1 - below_B1)
        score_B1 = score_B1.masked_fill(length_B1 <= k, -FORCED)  # keep all events
        return score_B1 if k > 1 else torch.full_like(score_B1, FORCED / 2)  # keep only the last event

    @torch.no_grad()
    def fit_steps(self) -> None:
        """Fit the step function to the network: bins hold equally many events, and a step is the mean of its bin."""
        at_G = torch.arange(GRID, device=self.times.device) * self.options.hash_bins // GRID  # bin of each grid point
        value_G = self.relevance(self.times)
        count = torch.bincount(at_G, minlength=self.options.hash_bins)
        self.steps.zero_().index_add_(0, at_G, value_G).div_(count)
        first = torch.nonzero(at_G.diff()).squeeze(1)
        self.edges.copy_((self.times[first] + self.times[first + 1]) / 2)

    def _noise(self, batch: Batch) -> Tensor:
        shape, like = batch.items.shape, batch.times
        if self.options.noise == "none":
            return torch.zeros(shape, device=like.device)
        if self.training:
            return self._draw(torch.rand(shape, device=like.device))
        items_BL = batch.items
        index_BL = items_BL * 7919 + items_BL[:, -1:] * 104_729 + _places(batch) * 1_299_709
        return self.table[index_BL % NOISE_TABLE]

    def _draw(self, uniform: Tensor) -> Tensor:
        """Return the configured noise, by applying its inverse distribution function to `uniform` in [0, 1)."""
        if self.options.noise == "uniform":
            return uniform
        uniform = uniform.clamp(1e-7, 1 - 1e-7)
        return torch.logit(uniform) if self.options.noise == "logistic" else torch.special.ndtri(uniform)


class STRec(SequenceModel):
    """A Transformer whose layers compute ever fewer rows, sampled by the time since each event."""

    Options = STRecOptions
    options: STRecOptions
    objectives = frozenset({"last"})
    other_views = frozenset({"soft"})  # training masks rows, `forward` leaves them out

    def __init__(self, options: STRecOptions, catalogue: Catalogue) -> None:
        super().__init__(options, catalogue)
        self.items = nn.Embedding(catalogue.num_items + 1, options.d_model, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(options.length, options.d_model).normal_(std=0.02))
        self.norm = nn.LayerNorm(options.d_model, NORM_EPS)
        self.dropout = Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        initialise(self)
        self.sampler = Sampler(options) if options.sampling != "none" else None
        self.shortest = max((k + 1 for k in options.rows if k < options.length), default=1)
        if options.attention in ("longformer", "flash"):  # how many chunks they cut is fixed in a graph
            self.shortest = options.length
        self.phase: str | None = None if self.sampler is not None else "hard"  # None: no phase yet, as after loading

    @classmethod
    def needs_of(cls, options: STRecOptions) -> frozenset[str]:
        return frozenset({"times"} if options.sampling == "time" else ())

    def serving_variants(self) -> dict[float, Any]:
        """Return options with which the same weights can be served, by the share of rows that they skip."""
        if self.sampler is None:
            return {}
        others = (replace(self.options, k=(), sparsity=sparsity) for sparsity in SPARSITIES)
        by_rows = (*others, self.options)  # of equal entries, the last one is kept
        return {1 - sum(options.rows) / len(options.rows) / options.length: options for options in by_rows}

    def phases(self, stage: str) -> tuple[str, ...]:
        """See `SequenceModel.phases`: the paper's two stages; the backbone has no first one."""
        if stage == "pretrain":
            return ("soft",) if self.sampler is not None else ()
        return ("hard",)

    def enter(self, phase: str) -> None:
        """See `SequenceModel.enter`; `hard` freezes the sampler."""
        self.phase = phase
        if self.sampler is not None:
            self.sampler.requires_grad_(phase == "soft")
            if phase == "hard" and self.options.hash_bins:
                self.sampler.fit_steps()

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """See `SequenceModel.forward`; without `last`, masks stand in for gathers and every row is computed."""
        if last:
            return self._gathered(batch)
        return self._masked(batch, soft=self.training and self.phase != "hard", last=False)

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """See `SequenceModel.training_loss`; the last event's output alone has a target."""
        query_B1D = self._gathered(batch) if self.phase == "hard" else self._masked(batch, soft=True, last=True)
        return {"task": task(query_B1D).sum()}

    def _embedded(self, items_BL: Tensor) -> Tensor:
        return self.dropout(self.norm(self.items(items_BL) + self.positions[-items_BL.shape[1] :]))  # (2)

    def _gathered(self, batch: Batch) -> Tensor:
        """Return (B, 1, D), computing `rows` of each layer: one gather, then slices (eqs. 6-8)."""
        real_BL = _real(batch)
        count_B1 = real_BL.sum(1, keepdim=True)
        # full sequences need no mask, but an exported graph must be valid for all lengths
        shortest = 0 if torch.compiler.is_compiling() else int(count_B1.min())
        some_BL = real_BL if shortest < real_BL.shape[1] else None
        x_BLD, bias, ranked = self._embedded(batch.items), _visible(some_BL), False
        for block, k in zip(self.blocks, self.options.rows, strict=True):
            assert isinstance(block, Block)
            rows: slice | Tensor = EVERY_ROW
            if k < x_BLD.shape[1]:
                rows, ranked = slice(k) if ranked else self._best(batch, some_BL, k), True
            x_BLD = block.attend(x_BLD, rows, bias)  # a separate statement, so that the input is freed
            x_BLD = block.transform(x_BLD)
            if ranked:  # padding ranks last, but is among the first k of shorter sequences
                few = shortest < k
                bias = _visible(torch.arange(k, device=x_BLD.device) < count_B1) if few else None
        return x_BLD[:, :1] if ranked else x_BLD[:, -1:]

    def _best(self, batch: Batch, real_BL: Tensor | None, k: int) -> slice | Tensor:
        """Return the `k` rows with the highest scores (eq. 6): the last event first, padding last."""
        return slice(-1, None) if k == 1 else self._scores(batch, real_BL, hard=True).topk(k).indices

    def _masked(self, batch: Batch, *, soft: bool, last: bool) -> Tensor:
        """Return all rows (B, L, D), or only that of the last event, with masks instead of gathers (eqs. 9-12)."""
        real_BL = _real(batch)
        masks = self._masks(batch, real_BL, soft)
        x_BLD = self._embedded(batch.items)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            rows = slice(-1, None) if last and number == self.options.layers - 1 else EVERY_ROW
            bias = _visible(real_BL)
            if masks and (number or self.options.mask == "literal"):  # S_0 = 1 changes no key
                bias = self._fading(masks[number + 1][:, rows], masks[number], real_BL)
            x_BLD = block.transform(block.attend(x_BLD, rows, bias))
        return x_BLD

    def _masks(self, batch: Batch, real_BL: Tensor, soft: bool) -> list[Tensor]:
        """Return S_0 .. S_L, each (B, L): soft masks (eq. 9), or 1 for the rows that `_gathered` computes."""
        if self.sampler is None:
            return []
        score_BL = self._scores(batch, real_BL, hard=not soft)
        everything_BL = torch.ones_like(score_BL)  # (10)
        if not soft:
            rank_BL = score_BL.argsort(dim=1, descending=True).argsort(dim=1)
            return [everything_BL, *((rank_BL < k).to(score_BL.dtype) for k in self.options.rows)]
        layers = range(1, self.options.layers + 1)
        masks = [everything_BL, *(self.sampler.soft_mask(score_BL, real_BL, layer) for layer in layers)]
        if self.training:
            self.sampler.measure(batch, score_BL, real_BL)
        return masks

    def _scores(self, batch: Batch, real_BL: Tensor | None, hard: bool) -> Tensor:
        assert self.sampler is not None
        steps = bool(self.options.hash_bins) and hard and self.phase != "soft"
        return self.sampler(batch, real_BL, steps)

    def _fading(self, query_BQ: Tensor, key_BL: Tensor, real_BL: Tensor) -> Tensor:
        """Return the bias of a layer's logits, from S of its queries and of its keys (eqs. 11 and 12)."""
        hidden_B11L = ~real_BL[:, None, None]
        if self.options.mask == "literal":
            both_B1QL = (query_BQ.unsqueeze(2) * key_BL.unsqueeze(1)).unsqueeze(1)
            return (LITERAL_SCALE * (both_B1QL - 1)).masked_fill(hidden_B11L, float("-inf"))
        # log(S_q S_k) = log S_q + log S_k, and a softmax ignores terms that are the same for all keys
        return (key_BL + LOG_FLOOR).log()[:, None, None].masked_fill(hidden_B11L, float("-inf"))


def _real(batch: Batch) -> Tensor:
    """Return bool (B, L): the positions with events; the last position counts as one even without events."""
    real_BL = batch.items != PAD
    real_BL[:, -1] = True
    return real_BL


def _visible(real_BL: Tensor | None) -> Tensor | None:
    return None if real_BL is None else real_BL[:, None, None]


def _standardised(value_BL: Tensor, real_BL: Tensor | None) -> Tensor:
    """Return z-scores within each sequence; 0 for a single event or equal values."""
    if real_BL is None:
        return F.layer_norm(value_BL, value_BL.shape[1:], eps=SCORE_EPS)
    count_B1 = real_BL.sum(1, keepdim=True)
    centred_BL = value_BL - (value_BL * real_BL).sum(1, keepdim=True) / count_B1
    variance_B1 = (centred_BL.square() * real_BL).sum(1, keepdim=True) / count_B1
    return centred_BL * (variance_B1 + SCORE_EPS).rsqrt()


def _places(batch: Batch) -> Tensor:
    """Return the distance (L,) of each position from the last event."""
    return torch.arange(batch.items.shape[1] - 1, -1, -1, device=batch.items.device)


def _transformed(times: Tensor, transform: str) -> Tensor:
    if transform == "asinh":
        return torch.asinh(times / MINUTE)
    return times.sign() * times.abs().log1p() if transform == "log1p" else times
