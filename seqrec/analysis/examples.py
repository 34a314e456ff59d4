"""Example users for the report: what each model recommends to them, and which of their events drove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.analysis import attribution, strec_sparsity
from seqrec.analysis.strec_sparsity import Point
from seqrec.artifacts import CASES, METRICS, RECOMMENDATIONS, REFITTED, read_json, read_table
from seqrec.counts.term import CountTerm
from seqrec.data.sequences import Sequences, read_items, read_users, window
from seqrec.data.sequences import load as load_sequences
from seqrec.models.base import PAD, Batch, SequenceModel
from seqrec.training.checkpoint import load_checkpoint

HIT_RANK = 10  # the lowest rank that counts as a hit

Maps = tuple[list[list[float]], list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """A model's recommendations for one user; `drop` and `attention` hold a number for each event of the history."""

    best: list[int]  # items, best first
    rank: float  # of the target
    drop: list[float]  # how much the first item's score drops without the event
    attention: list[float] | None = None  # None for a model without attention over events


@dataclass(frozen=True, kw_only=True)
class Example:
    """A user's history, the held-out item that came next, and the models' opinions."""

    user_id: str
    history: list[int]  # items, oldest first
    target: int
    opinions: dict[str, Opinion]  # by model


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Users to show, and the titles of their items."""

    users: list[Example] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # item -> its title, or its id if it has none
    # Of models with masks: attention (L, L) between the first user's events, without the masks and with them.
    masked: dict[str, Maps] = field(default_factory=dict)
    # Of models that compute some rows: `strec_sparsity.sweep`.
    sparse: dict[str, list[Point]] = field(default_factory=dict)


def choose(
    *,
    leader: str,
    folders: Mapping[str, Path],
    reports: Path,
    sequences: Path,
    number: int,
    seed: int,
) -> Examples:
    """Draw users, half of them with a target that `leader` found, and collect every model's recommendations.

    Args:
        leader: key of a model.
        folders: folder of each model's checkpoint, loaded one at a time; titles come from that of `leader`.
        reports: holds `<model>/` with cases and recommendations.
        sequences: the prepared dataset.
        number: number of users; fewer if fewer have a history and a test case.
        seed: seed of the draw.
    """
    cases = _first_cases(reports / leader)
    chosen = _draw(cases["rank"], cases["position"], number, seed)
    if len(chosen) == 0:
        return Examples()
    user, position, target = (cases[name][chosen] for name in ("user", "position", "target"))
    loaded = load_sequences(sequences)
    opinions, masked, sparse = {}, {}, {}
    for name, folder in folders.items():
        saved = load_checkpoint(folder)
        if name == leader:
            titles = saved.titles
        best = _lists(reports / name, user)
        ranks = _first_cases(reports / name)["rank"][chosen].tolist()
        if points := strec_sparsity.sweep(saved.model, loaded, filter_seen=saved.card["filter_seen"], seed=seed):
            sparse[name] = points
        if read_json(reports / name / METRICS).get("refit"):  # it ranked the test cases
            saved = load_checkpoint(folder / REFITTED)
        batch = _histories(loaded, user, position, saved.model)
        opinions[name] = _opinions(saved.model, batch, best, ranks, saved.count_term)
        if (maps := _first_maps(saved.model, batch)) is not None:
            masked[name] = maps
        del saved  # before the next one is read
    user_ids = read_users(sequences)
    users = [
        Example(
            user_id=user_ids[number - 1],
            history=[item for item in batch.items[row].tolist() if item != PAD],
            target=int(target[row]),
            opinions={name: rows[row] for name, rows in opinions.items()},
        )
        for row, number in enumerate(user.tolist())
    ]
    return Examples(users=users, names=_names(users, sequences, titles), masked=masked, sparse=sparse)


def _first_cases(report: Path) -> dict[str, NDArray[Any]]:
    """Return user, position, target and rank of each user's first test case, the one with a recorded list."""
    names = ["user", "position", "target", "rank"]
    table = read_table(report / CASES, [*names, "split"])
    table = table.filter(pc.equal(table["split"], "test"))
    columns = {name: table[name].to_numpy() for name in names}
    first = np.unique(columns["user"], return_index=True)[1]
    return {name: column[first] for name, column in columns.items()}


def _draw(rank: NDArray[Any], position: NDArray[Any], number: int, seed: int) -> NDArray[Any]:
    """Return the indices of `number` cases with a history; cases with a found target come first."""
    order = np.random.default_rng(seed).permutation(np.flatnonzero(position > 0))
    found, missed = order[rank[order] <= HIT_RANK], order[rank[order] > HIT_RANK]
    half = min(len(found), max(number // 2, number - len(missed)))
    return np.concatenate([found[:half], missed[: number - half]])


def _histories(data: Sequences, user: NDArray[Any], position: NDArray[Any], model: SequenceModel) -> Batch:
    index = torch.from_numpy(user.astype(np.int64)) - 1
    stop = data.start[index] + torch.from_numpy(position.astype(np.int64))
    return window(data, index, stop, int(position.max()), from_request=model.options.from_request)


def _lists(report: Path, user: NDArray[Any]) -> list[list[int]]:
    wanted = user.tolist()
    table = read_table(report / RECOMMENDATIONS)
    table = table.filter(pc.is_in(table["user"], pa.array(wanted, table["user"].type))).sort_by("rank")
    rows = list(zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True))
    return [[item for owner, item in rows if owner == number] for number in wanted]


def _opinions(
    model: SequenceModel, batch: Batch, best: Sequence[list[int]], ranks: Sequence[float], term: CountTerm | None
) -> list[Opinion]:
    first_B = torch.tensor([next(iter(items), PAD) for items in best])
    drop = _by_event(attribution.leave_one_out(model, batch, first_B, term), batch)
    weight_BL = attribution.attention(model, batch)
    attention = [None] * len(best) if weight_BL is None else _by_event(weight_BL, batch)
    rows = zip(best, ranks, drop, attention, strict=True)
    return [Opinion(best=items, rank=rank, drop=lost, attention=read) for items, rank, lost, read in rows]


def _by_event(value_BL: Tensor, batch: Batch) -> list[list[float]]:
    rows = zip(value_BL, batch.items != PAD, strict=True)
    return [value_L[real_L].tolist() for value_L, real_L in rows]


def _first_maps(model: SequenceModel, batch: Batch) -> Maps | None:
    real = int((batch.items[0] != PAD).sum())
    maps = attribution.masked_attention(model, Batch(batch.items[:1, -real:], batch.times[:1, -real:], batch.user[:1]))
    return None if maps is None else (maps[0][0].tolist(), maps[1][0].tolist())


def _names(users: Sequence[Example], sequences: Path, titles: Mapping[str, str]) -> dict[int, str]:
    lists = (opinion.best for user in users for opinion in user.opinions.values())
    wanted = sorted({user.target for user in users}.union(*lists, *(user.history for user in users)))
    item_ids = read_items(sequences)
    return {item: titles.get(item_ids[item - 1], item_ids[item - 1]) for item in wanted}
