"""Starting from the champion on a catalogue that has changed since: what it learnt of old items and users is kept."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from models import REGISTRY
from models.base import Catalogue, SequenceModel
from seqrec.artifacts import MODEL_CARD, REFIT, USERS, VOCABULARY, WEIGHTS
from seqrec.training import cards

logger = logging.getLogger(__name__)
Rows = tuple[Tensor, Tensor]  # row numbers in the new table, and of the same item or user in the old one


def warm_start(net: SequenceModel, sequences: Path, champion: Path) -> bool:
    """Give `net` the champion's values, row by row where a table has one an item or a user; new rows stay as they are.

    Args:
        net: freshly built for the dataset in `sequences`.
        sequences: folder of the prepared dataset.
        champion: folder with weights, card, vocabulary and users of the champion; empty if there is none.

    Returns:
        Whether there is a champion of the same architecture and options; `net` is unchanged otherwise.

    Raises:
        ValueError: a file is not the one that the card was written for, or the weights know the held-out events.
    """
    if not (champion / MODEL_CARD).is_file():
        logger.info("no champion to start from")
        return False
    try:
        card = cards.read(champion)
        cards.check_complete(champion, card)
    except ValueError as error:
        logger.warning("the champion is not used: %s", error)
        return False
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(net.options).items()}
    same = REGISTRY.get(card["architecture"]) is type(net) and card["options"] == options
    if net.text or not same:
        logger.info("the champion, a %s, has another architecture or other options: not used", card["architecture"])
        return False
    if REFIT in card:
        raise ValueError(
            f"{champion} was refitted on every event, those of a later test too: start from what it was before"
        )
    cards.verify(champion, card)
    items = _common(champion / VOCABULARY, sequences / VOCABULARY, "item", "item_id")
    users = _common(champion / USERS, sequences / USERS, "user", "user_id")
    old, new = load_file(champion / WEIGHTS), net.state_dict()
    number = {"items": (net.catalogue.num_items, card["catalogue"]["num_items"], items)}
    number["users"] = (net.catalogue.num_users, card["catalogue"]["num_users"], users)
    for name, kind in _kinds(net).items():
        if kind:
            _carry(new[name], old[name], *number[kind])
        else:
            new[name].copy_(old[name])
    logger.info("warm start: %d of %d items known to the champion", len(items[0]), net.catalogue.num_items)
    return True


def _common(old: Path, new: Path, number: str, key: str) -> Rows:
    """Return the numbers of what is in both tables, in the new one and in the old one."""
    before, now = (pq.read_table(path, columns=[number, key]) for path in (old, new))
    place = pc.index_in(now[key], value_set=before[key].combine_chunks())
    both = pc.is_valid(place)
    rows = (now[number].filter(both), before[number].take(place.filter(both)))
    return tuple(torch.from_numpy(pa.chunked_array(one).to_numpy().astype("int64")) for one in rows)  # type: ignore


def _kinds(net: SequenceModel) -> dict[str, str]:
    """Return for each tensor of the state whether its rows are items, users, or neither: of which its size depends."""

    def sizes(num_items: int, num_users: int) -> dict[str, torch.Size]:
        with torch.random.fork_rng(devices=[]):
            model = type(net)(net.options, Catalogue(num_items, num_users, net.catalogue.length))
        return {name: value.shape for name, value in model.state_dict().items()}

    plain, more_items, more_users = sizes(7, 5), sizes(8, 5), sizes(7, 6)
    kinds = {}
    for name, shape in plain.items():
        by_item, by_user = more_items[name] != shape, more_users[name] != shape
        assert not (by_item and by_user), f"{name} has a row for each pair of item and user"
        kinds[name] = "items" if by_item else "users" if by_user else ""
    return kinds


def _carry(new: Tensor, old: Tensor, new_number: int, old_number: int, rows: Rows) -> None:
    """Copy the rows of `rows`, and those that are no item or user: padding or unknown before them, the mask after."""
    into, source = rows
    new[into] = old[source]
    new[0] = old[0]
    new[new_number + 1 :] = old[old_number + 1 :]
