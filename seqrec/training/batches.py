"""The windows of training events that an epoch visits, in batches of equal work."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seqrec.config import TrainConfig
from seqrec.data.sequences import WIDTH_STEP, Sequences, ranges, train_events
from seqrec.models.base import Options


class Windows(NamedTuple):
    """Windows of an epoch; on the CPU, because planning the batches must not wait for the device."""

    user: Tensor  # (W,) int64, index into Sequences.start
    stop: Tensor  # (W,) int64, flat index after the last event, which is a target
    width: Tensor  # (W,) int64, positions of the input


def windows(data: Sequences, options: Options, config: TrainConfig, generator: torch.Generator) -> Windows:
    """Return the windows of an epoch. Each has at least two events, all of them training events.

    The objectives causal and cloze take each user's last window; with `windows: all`, a chain of windows that covers
    the training events without overlap. The objective last takes every prefix, or `prefixes_per_user` random ones.
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
    """Return bool (U,), on the CPU: the users with training windows, who are the users that the weights get to know."""
    trained = data.trained().cpu()
    if config.user_share < 1:
        order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(config.seed))
        able = order[trained[order]]  # a refit can train on more users, in the same order
        trained = trained.index_fill(0, able[math.ceil(len(able) * config.user_share - 1e-9) :], value=False)
    return trained


def trained_counts(data: Sequences, config: TrainConfig) -> Tensor:
    """Return (V,) int64: how often each item occurs in the training events of the users of `trained_users`."""
    if config.user_share == 1:
        return data.count
    user, item = train_events(data)
    known = trained_users(data, config).to(user.device)
    return item[known[user]].bincount(minlength=len(data.count))


def _prefixes(start: Tensor, stop: Tensor, config: TrainConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (user, stop) of each prefix whose target is neither the first event nor before `earliest_target`."""
    number = config.prefixes_per_user
    first = ((stop - start - 1) * config.earliest_target).long().clamp(min=1)
    targets = (stop - start - first).clamp(min=0)
    user, rank = ranges(torch.zeros_like(targets), targets)  # rank within the user
    if number:  # shuffle within each user and keep the first `number`
        order = (user + torch.rand(len(user), generator=generator, dtype=torch.float64)).argsort()
        chosen = order[rank < number]  # `rank` counts within the user in sorted order as well
        user, rank = user[chosen], rank[chosen]
    return user, start[user] + first[user] + rank + 1


def _chains(start: Tensor, stop: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (user, stop) of windows that go back from the user's last training event and share no target."""
    covered = (stop - start - int(not options.masked)).clamp(min=0)
    number = -(-covered // options.length)
    user, back = ranges(torch.zeros_like(number), number)  # back: 0 is the user's last window
    return user, stop[user] - back * options.length


def plan(width_W: Tensor, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Divide the windows into batches of similar width and equal work, in random order.

    Each batch holds as many positions as `batch_size` windows of average width. Short histories are therefore not
    padded to the length of long ones, and every target has about the same weight. `width_W` is on the CPU.
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
    """Divide `number` windows into random batches of equal size, for losses with in-batch negatives.

    The size is at most `batch_size` and a multiple of `processes`. Windows that fill no batch wait for another epoch.
    """
    size = min(batch_size, number)
    size = max(processes, size - size % processes)
    order = torch.randperm(number, generator=generator)
    return list(order[: number - number % size].split(size))
