"""Warm start from the champion on a changed catalogue: items and users that it knows keep their learnt vectors."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from seqrec.artifacts import MODEL_CARD, REFIT, USERS, VOCABULARY, DamagedError, read_table
from seqrec.models import REGISTRY
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.models.ensemble import create
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.held_out import held_out_now

logger = logging.getLogger(__name__)
Rows = tuple[Tensor, Tensor]  # row numbers in the new table, and those of the same items or users in the old one


def warm_start(net: SequenceModel, sequences: Path, folder: Path) -> bool:
    """Copy the champion's weights into `net`; in tables of items or users, only the rows that both models have.

    `net` is newly built for the prepared dataset in `sequences`. `folder` holds the champion's checkpoint, or nothing.

    Returns:
        Whether there is a champion of the same architecture and options that cannot have been trained on an event
        which is held out now; otherwise `net` is unchanged.

    Raises:
        ValueError: a file is not the one that the card lists, or the champion was trained on held-out events.
    """
    if not (folder / MODEL_CARD).is_file():
        logger.info("there is no champion to start from")
        return False
    try:
        champion = load_checkpoint(folder)
    except DamagedError:
        raise
    except ValueError as error:
        logger.warning("the champion is not used: %s", error)
        return False
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(net.options).items()}
    card = champion.card
    if REGISTRY.get(card["architecture"]) is not net.architecture or card["options"] != options:
        logger.info("the champion (%s) is not used: its architecture or options differ", card["architecture"])
        return False
    if REFIT in card:
        raise ValueError(
            f"{folder} was refitted on every event, including test events: start from the evaluated version"
        )
    if reason := held_out_now(champion, sequences):
        logger.warning("the champion is not used: %s", reason)
        return False
    items = _common(champion.vocabulary, sequences / VOCABULARY, "item", "item_id")
    users = _common(champion.users, sequences / USERS, "user", "user_id")
    old, new = champion.model.state_dict(), net.state_dict()
    for name, kind in _kinds(net).items():
        if kind == "items":
            _carry(new[name], old[name], net.catalogue.num_items, champion.model.catalogue.num_items, items)
        elif kind == "users":
            _carry(new[name], old[name], net.catalogue.num_users, champion.model.catalogue.num_users, users)
        else:
            new[name].copy_(old[name])
    logger.info("warm start: the champion knows %d of %d items", len(items[0]), net.catalogue.num_items)
    return True


def _common(before: pa.Table, path: Path, number: str, key: str) -> Rows:
    """Return the row numbers of the entries that both tables have, in the new and in the old table."""
    now = read_table(path, [number, key])
    row_before = pc.index_in(now[key], value_set=before[key].combine_chunks())
    common = pc.is_valid(row_before)
    rows = (now[number].filter(common), before[number].take(row_before.filter(common)))
    return tuple(torch.from_numpy(pa.chunked_array(row).to_numpy().astype("int64")) for row in rows)  # type: ignore


def _kinds(net: SequenceModel) -> dict[str, str]:
    """Return for each tensor whether its rows are items, users or neither, judged by what its size depends on."""

    def sizes(num_items: int, num_users: int) -> dict[str, torch.Size]:
        with torch.random.fork_rng(devices=[]):
            model = create(net.architecture, net.options, Catalogue(num_items, num_users, net.catalogue.length))
        return {name: value.shape for name, value in model.state_dict().items()}

    plain, more_items, more_users = sizes(7, 5), sizes(8, 5), sizes(7, 6)
    kinds = {}
    for name, shape in plain.items():
        by_item, by_user = more_items[name] != shape, more_users[name] != shape
        assert not (by_item and by_user), f"{name} has a row for each pair of item and user"
        kinds[name] = "items" if by_item else "users" if by_user else ""
    return kinds


def _carry(new: Tensor, old: Tensor, new_number: int, old_number: int, rows: Rows) -> None:
    """Copy the common rows, and the special ones: padding or unknown user before them, the mask after them."""
    into, source = rows
    new[into] = old[source]
    new[0] = old[0]
    new[new_number + 1 :] = old[old_number + 1 :]
