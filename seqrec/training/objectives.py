"""What a training step predicts: the inputs and targets of its windows, and the loss.

Objective and loss can be combined freely. `causal`: every position predicts the next event. `last`: each prefix has
one target, the event after it. `cloze`: masked positions are predicted from both sides (BERT4Rec).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqrec.config import TrainConfig
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.models.base import PAD, Batch, Options, SequenceModel
from seqrec.training import losses
from seqrec.training.batches import Windows
from seqrec.training.losses import PastItems


class Example(NamedTuple):
    """A training batch with its targets."""

    batch: Batch
    target_BL: Tensor  # item to predict at each position, PAD where there is none
    number: int  # number of targets
    weight: float  # weight of a target: 1 / targets of the step, over all processes


def example(
    data: Sequences,
    options: Options,
    config: TrainConfig,
    chosen: Windows,
    *,
    seed: int,
    process: int = 0,
    processes: int = 1,
) -> Example:
    """Build the share of one of the `processes` in a step of the windows `chosen`.

    Every process gets all windows of the step and the same `seed`, so they need not communicate.
    """
    width = sequences.padded_width(int(chosen.width.max()), options.length)
    targeted_BL = _targeted(options.objective, chosen.width, width, config, seed)
    mine = slice(process, None, processes) if config.resident else _neighbours(chosen.user, process, processes)
    own_BL = targeted_BL[mine]
    if not len(own_BL):  # fewer windows than processes: this one computes a window without targets
        mine, own_BL = slice(1), torch.zeros_like(targeted_BL[:1])
    user, stop = (sequences.sent(x[mine], data.items.device) for x in (chosen.user, chosen.stop))
    batch = sequences.window(data, user, stop, width)
    target_BL = batch.items.masked_fill(~data.sent(own_BL), PAD)
    if options.masked:
        batch = batch._replace(items=torch.where(target_BL != PAD, data.num_items + 1, batch.items))
    else:
        batch = sequences.window(data, user, stop - 1, width, from_request=options.from_request)
    # DDP divides the gradients by the number of processes, so the weight is multiplied by it
    weight = processes / int(targeted_BL.sum())
    return Example(batch, target_BL, int(own_BL.sum()), weight)


def _neighbours(user_W: Tensor, process: int, processes: int) -> Tensor | slice:
    """Return the windows of a process: those of neighbouring users, so that it reads one part of a mapped file."""
    if processes == 1:
        return slice(None)
    first, stop = (len(user_W) * share // processes for share in (process, process + 1))
    return user_W.argsort(stable=True)[first:stop]


def with_target(example: Example) -> Example:
    """Return the example with its targets appended to the batch, for models with a loss of their own."""
    batch, target_B1 = example.batch, example.target_BL[:, -1:]
    items, times = torch.cat([batch.items, target_B1], 1), torch.nn.functional.pad(batch.times, (0, 1))
    return example._replace(batch=batch._replace(items=items, times=times))


def past_items(
    example: Example, options: Options, query_N: Tensor, positions: int, skip_last: bool = False
) -> PastItems:
    """Return the past events of each query: those up to its position; with cloze, all events that are not masked.

    `query_N` are indices into the last `positions` positions of each row, rows concatenated; with `skip_last`, into
    those before the last one.
    """
    length = example.batch.items.shape[1]
    column_N = query_N % positions + (length - skip_last - positions)
    stop_N = torch.full_like(column_N, length) if options.masked else column_N + 1
    return PastItems(example.batch.items, query_N // positions, stop_N)


def _targeted(objective: str, width_B: Tensor, width: int, config: TrainConfig, seed: int) -> Tensor:
    """Return bool (B, L), on the CPU: the positions with a target."""
    real_BL = torch.arange(width) >= width - width_B.unsqueeze(1)
    if objective == "causal":
        return real_BL
    last_BL = (torch.arange(width) == width - 1).expand_as(real_BL)
    if objective == "last":
        return last_BL
    generator = torch.Generator().manual_seed(seed)
    masked_BL = real_BL & (torch.rand(real_BL.shape, generator=generator) < config.mask_probability)
    only_last_B = torch.rand(len(real_BL), generator=generator) < config.mask_last_share
    return torch.where((only_last_B | ~masked_BL.any(1)).unsqueeze(1), last_BL, masked_BL)


class Loss:
    """The loss that `loss`, `negatives`, `sampler` and `gbce_t` describe; it draws from torch's global generator."""

    def __init__(self, config: TrainConfig, count_V: Tensor) -> None:
        self.config = config
        weight_V = torch.ones_like(count_V, dtype=torch.float64)
        if config.sampler != "uniform":  # in_batch as well: targets of a random step follow popularity
            weight_V = count_V.double()
        weight_V[0] = 0  # padding is never drawn
        self.cumulative_V = weight_V.cumsum(0) / weight_V.sum()
        gbce = config.loss == "gbce"
        self.beta = losses.gbce_beta(config.gbce_t, config.negatives, len(count_V) - 1) if gbce else 1.0
        self.log_expected_V = (config.negatives * weight_V / weight_V.sum()).clamp(min=1e-12).log().float()

    def __call__(
        self, query_ND: Tensor, model: SequenceModel, target_N: Tensor, past: PastItems | None = None
    ) -> Tensor:
        """Return the loss of each target (N,); with `exclude_past`, the items of `past` are no candidates."""
        config = self.config

        def vectors_of(items: Tensor) -> Tensor:
            return model.vectors_of(items, sparse=config.sparse_tables).float()

        if config.loss == "ce":
            item_VD = model.item_vectors().float()
            return losses.cross_entropy(query_ND, item_VD, target_N, precision=config.precision, past=past)
        if config.loss == "sampled_ce":
            drawn_K = self.draw(target_N, config.negatives)
            return losses.sampled_cross_entropy(
                query_ND, vectors_of, target_N, drawn_K, self.log_expected_V, precision=config.precision
            )
        drawn_NK = self.draw(target_N, len(target_N), config.negatives)
        if config.loss == "bpr":
            return losses.bayesian_personalized_ranking(query_ND, vectors_of, target_N, drawn_NK)
        return losses.binary_cross_entropy(query_ND, vectors_of, target_N, drawn_NK, beta=self.beta)

    def draw(self, target_N: Tensor, *shape: int) -> Tensor:
        """Return items (`shape`) drawn from the sampler's distribution."""
        if self.config.sampler == "in_batch" and len(target_N):
            return target_N[torch.randint(len(target_N), shape, device=target_N.device)]
        uniform = torch.rand(shape, dtype=torch.float64, device=self.cumulative_V.device)
        return torch.searchsorted(self.cumulative_V, uniform, right=True).clamp(max=len(self.cumulative_V) - 1)
