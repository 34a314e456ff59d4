"""What a training step predicts: the windows of an epoch, their batches, inputs and targets, and the loss.

Objective and loss are independent switches. `causal`: every position predicts the event after it. `last`: one
target per prefix, at its end. `cloze`: masked positions are predicted from both sides (BERT4Rec).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.base import PAD, Batch, Options
from seqrec.config import TrainConfig
from seqrec.data import sequences
from seqrec.data.sequences import WIDTH_STEP, Sequences
from seqrec.training import losses


class Windows(NamedTuple):
    """What an epoch visits; on the CPU, since the plan needs sizes and must not wait for the device."""

    user: Tensor  # (W,) int64, index into Sequences.start
    stop: Tensor  # (W,) int64, flat index behind the last event, target included
    width: Tensor  # (W,) int64, positions of the input


class Example(NamedTuple):
    """A training batch with its targets."""

    batch: Batch
    target_BL: Tensor  # item to predict at each position, PAD where there is none
    number: int  # targets in it
    weight: float  # of one target: 1 / targets in the step, over all processes


def windows(data: Sequences, options: Options, config: TrainConfig, generator: torch.Generator) -> Windows:
    """Return the windows of an epoch; none reaches `train_stop`, none has fewer than two events.

    causal and cloze take each user's last window, or with `windows: all` every one of a chain that covers the train
    events without overlap; last takes every prefix, or `prefixes_per_user` random ones.
    """
    start, stop = data.start.cpu(), data.train_stop.cpu()
    if options.objective == "last":
        user, stop = _prefixes(start, stop, config, generator)
    elif config.windows == "all":
        user, stop = _chains(start, stop, options)
    else:
        user = torch.arange(len(start))
    length = stop - start[user]
    inputs = length - int(not options.masked)
    chosen = (length >= 2) & trained_users(data, config)[user]
    return Windows(user[chosen], stop[chosen], inputs[chosen].clamp(max=options.length))


def trained_users(data: Sequences, config: TrainConfig) -> Tensor:
    """Return bool (U,), on the CPU: the users that training has windows of."""
    trained = data.trained().cpu()
    if config.user_share < 1:
        order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(config.seed))
        trained &= order < math.ceil(len(trained) * config.user_share)
    return trained


def _prefixes(start: Tensor, stop: Tensor, config: TrainConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (user, stop) of each prefix whose target is not the user's first event, nor before `earliest_target`."""
    number = config.prefixes_per_user
    first = ((stop - start - 1) * config.earliest_target).long().clamp(min=1)
    targets = (stop - start - first).clamp(min=0)
    user = torch.repeat_interleave(torch.arange(len(start)), targets)
    place = torch.arange(len(user)) - torch.repeat_interleave(targets.cumsum(0) - targets, targets)
    if number:  # shuffle within each user, keep the first ones
        order = (user + torch.rand(len(user), generator=generator, dtype=torch.float64)).argsort()
        chosen = order[place < number]  # `place` counts within the user in sorted order as well
        user, place = user[chosen], place[chosen]
    return user, start[user] + first[user] + place + 1


def _chains(start: Tensor, stop: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (user, stop) of windows that go back from the end of train without sharing a target."""
    covered = (stop - start - int(not options.masked)).clamp(min=0)
    number = -(-covered // options.length)
    user = torch.repeat_interleave(torch.arange(len(start)), number)
    place = torch.arange(len(user)) - torch.repeat_interleave(number.cumsum(0) - number, number)
    return user, stop[user] - place * options.length


def plan(width_W: Tensor, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Divide the windows into batches of like width and equal work, in random order.

    A batch holds as many positions as `batch_size` windows of average width, so that short histories are not padded
    to the length of long ones and every target weighs about the same.

    Args:
        width_W: number of positions of each window (CPU).
        batch_size: average number of windows in a batch.
        generator: source of the order.
    """
    order = torch.randperm(len(width_W), generator=generator)
    bucket = (width_W[order] + WIDTH_STEP - 1) // WIDTH_STEP
    order = order[bucket.argsort(stable=True)]
    work = width_W[order].cumsum(0)
    batches = max(1, round(len(order) / batch_size))
    number = (work - 1) * batches // max(1, int(work[-1]))
    parts = torch.split(order, torch.bincount(number, minlength=batches).tolist())
    filled = [part for part in parts if len(part)]
    return [filled[i] for i in torch.randperm(len(filled), generator=generator).tolist()]


def plan_of_size(number: int, batch_size: int, processes: int, generator: torch.Generator) -> list[Tensor]:
    """Divide `number` windows into random batches of one size, whose rows are each other's negatives.

    The size is `batch_size`, or as many windows as there are, less what `processes` cannot share equally. What is left
    over waits for the next epoch.
    """
    size = min(batch_size, number)
    size = max(processes, size - size % processes)
    order = torch.randperm(number, generator=generator)
    return list(order[: number - number % size].split(size))


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
    """Build a process's share of a step; every process knows the step's windows, so none asks another.

    Args:
        data: the dataset on the device.
        options: of the model.
        config: of the stage.
        chosen: the windows of the step, over all processes.
        seed: of this step's draws; the same on every process.
        process: index of this process.
        processes: how many share the step.
    """
    width = sequences.padded_width(int(chosen.width.max()), options.length)
    targeted_BL = _targeted(options.objective, chosen.width, width, config, seed)
    mine = slice(process, None, processes) if config.resident else _neighbours(chosen.user, process, processes)
    user, stop = (x[mine].to(data.items.device, non_blocking=True) for x in (chosen.user, chosen.stop))
    target_BL = sequences.window(data, user, stop, width).items
    target_BL = target_BL.masked_fill(~targeted_BL[mine].to(target_BL.device, non_blocking=True), PAD)
    if options.masked:
        batch = sequences.window(data, user, stop, width)
        mask = torch.where(target_BL != PAD, data.num_items + 1, batch.items)
        batch = batch._replace(items=mask)
    else:
        batch = sequences.window(data, user, stop - 1, width)
    # DDP averages the gradients of the processes: scale up what it will divide
    weight = processes / int(targeted_BL.sum())
    return Example(batch, target_BL, int(targeted_BL[mine].sum()), weight)


def _neighbours(user_W: Tensor, process: int, processes: int) -> Tensor | slice:
    """Return which windows are a process's: of neighbouring users, so that it reads its own part of a mapped file."""
    if processes == 1:
        return slice(None)
    first, stop = (len(user_W) * place // processes for place in (process, process + 1))
    return user_W.argsort(stable=True)[first:stop]


def with_target(example: Example) -> Example:
    """Return the example with its targets as the batch's last events, for models that bring their own loss."""
    batch, target_B1 = example.batch, example.target_BL[:, -1:]
    items, times = torch.cat([batch.items, target_B1], 1), torch.nn.functional.pad(batch.times, (0, 1))
    return example._replace(batch=batch._replace(items=items, times=times))


def past(example: Example, options: Options, place_N: Tensor, positions: int) -> losses.Past:
    """Return what is known of each query's user: all events up to its own, with cloze all that are not masked.

    Args:
        example: the batch.
        options: of the model.
        place_N: the queries among the last `positions` of each row, rows laid end to end.
        positions: queries in a row.
    """
    length = example.batch.items.shape[1]
    column_N = place_N % positions + length - positions
    stop_N = torch.full_like(column_N, length) if options.masked else column_N + 1
    return losses.Past(example.batch.items, place_N // positions, stop_N)


def _targeted(objective: str, width_B: Tensor, width: int, config: TrainConfig, seed: int) -> Tensor:
    """Return (B, L) bool, on the CPU: which positions have a target."""
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
    """The loss of settings `loss`, `negatives`, `sampler` and `gbce_t`; draws come from torch's global generator."""

    def __init__(self, config: TrainConfig, count_V: Tensor) -> None:
        self.config = config
        weight_V = torch.ones_like(count_V, dtype=torch.float64)
        if config.sampler != "uniform":  # the targets of a random step are popular in the same measure
            weight_V = count_V.double()
        weight_V[0] = 0  # padding is never drawn
        self.cumulative_V = weight_V.cumsum(0) / weight_V.sum()
        self.log_expected_V = (config.negatives * weight_V / weight_V.sum()).clamp(min=1e-12).log().float()

    def __call__(self, query_ND: Tensor, item_VD: Tensor, target_N: Tensor, past: losses.Past | None = None) -> Tensor:
        """Return the loss of each target (N,); with `exclude_past`, `past` are no candidates."""
        config, sparse = self.config, self.config.sparse_tables
        if config.loss == "ce":
            return losses.cross_entropy(query_ND, item_VD, target_N, precision=config.precision, past=past)
        if config.loss == "sampled_ce":
            drawn_K = self.draw(target_N, config.negatives)
            return losses.sampled_cross_entropy(
                query_ND, item_VD, target_N, drawn_K, self.log_expected_V, sparse=sparse
            )
        drawn_NK = self.draw(target_N, len(target_N), config.negatives)
        if config.loss == "bpr":
            return losses.bayesian_personalized_ranking(query_ND, item_VD, target_N, drawn_NK, sparse=sparse)
        calibration = config.gbce_t if config.loss == "gbce" else None
        return losses.binary_cross_entropy(
            query_ND, item_VD, target_N, drawn_NK, calibration=calibration, sparse=sparse
        )

    def draw(self, target_N: Tensor, *shape: int) -> Tensor:
        """Return items (shape) of the sampler's distribution."""
        if self.config.sampler == "in_batch":
            return target_N[torch.randint(len(target_N), shape, device=target_N.device)]
        uniform = torch.rand(shape, dtype=torch.float64, device=self.cumulative_V.device)
        return torch.searchsorted(self.cumulative_V, uniform, right=True).clamp(max=len(self.cumulative_V) - 1)
