"""Training events of a user that have the same time: whether their order is random, and other orders of them.

Many logs know only the day of an event, or get several events at once. A third to a half of the events of public logs
have the time of the event before, and then the order in the file decides which of them comes first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqrec.data.sequences import Sequences, ranges

READ = 1 << 20  # maximum number of training events that are read to see whether an order is random
AGREEMENT = 0.55  # share of users that agree on an order, from which on it is not random; at random, it is 0.5
FEW = 0.05  # share of tied events below which their order does not matter


def are_ordered(data: Sequences) -> bool:
    """Return whether training events of the same time follow an order, as in a sorted file, or are few.

    An order counts if users agree on it significantly more often than on a random one.
    """
    agreed, error = agreement(data)
    return agreed >= max(AGREEMENT, 0.5 + 2 * error)


def agreement(data: Sequences) -> tuple[float, float]:
    """Return how often two users agree on the order of two items at one time, and its standard error at random.

    Only items next to each other count. The share is 0.5 in a random order, and 1 in that of a sorted file or where
    tied events are few; without pairs that two users have, it is 0.5.
    """
    number = (data.train_stop - data.start).cpu()
    users = max(1, int((number.cumsum(0) <= READ).sum()))
    user, event = ranges(data.start.cpu()[:users], number[:users])
    item = data.items[event.to(data.items.device)].cpu().long()
    first, second = item[:-1], item[1:]
    joined = _joined(data, user, event)
    tied = joined & (first != second)
    if joined.sum() < FEW * len(event) or not tied.any():
        return 1.0, 0.0
    first, second = first[tied], second[tied]
    pair = torch.minimum(first, second) * (data.num_items + 1) + torch.maximum(first, second)
    _, index, number = pair.unique(return_inverse=True, return_counts=True)
    rising = torch.bincount(index[first < second], minlength=len(number)).double()
    falling, repeated = number - rising, number >= 2
    couples = (number * (number - 1) / 2)[repeated]  # of users that have the pair
    if len(couples) == 0:
        return 0.5, 0.5
    agreeing = (rising * (rising - 1) + falling * (falling - 1))[repeated] / 2
    return float((agreeing / couples).mean()), float((0.25 / couples).sum().sqrt() / len(couples))


def mirrored(data: Sequences) -> Sequences:
    """Return `data` with the order of training events of the same time reversed."""
    event, group = groups(data)
    first = torch.searchsorted(group, group)
    last = torch.searchsorted(group, group, right=True) - 1
    return _placed(data, event, first + last - torch.arange(len(group)))


def groups(data: Sequences) -> tuple[Tensor, Tensor]:
    """Return the flat indices (N,) of the training events, and the number (N,) of the group of each.

    Events of a user at the same time are a group; groups are numbered in order.
    """
    user, event = ranges(data.start.cpu(), (data.train_stop - data.start).cpu())
    new = torch.ones(len(event), dtype=torch.bool)
    new[1:] = ~_joined(data, user, event)
    return event, new.cumsum(0)


def shuffled(data: Sequences, event: Tensor, group: Tensor, generator: torch.Generator) -> Sequences:
    """Return `data` with the items of each group of training events in random order; see `groups`."""
    return _placed(data, event, (group + torch.rand(len(group), generator=generator, dtype=torch.float64)).argsort())


def _placed(data: Sequences, event: Tensor, order: Tensor) -> Sequences:
    """Return `data` with the items of the events (N,) in another order (N,)."""
    source = torch.arange(len(data.items))
    source[event] = event[order]
    return replace(data, items=data.items[source.to(data.items.device)])


def _joined(data: Sequences, user: Tensor, event: Tensor) -> Tensor:
    """Return bool (N - 1,): whether each event but the first has user and time of the event before."""
    time = data.times[event.to(data.times.device)].cpu()
    return (user[1:] == user[:-1]) & (time[1:] == time[:-1])
