"""Whether a checkpoint may have been trained on what a prepared dataset holds out now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seqrec.artifacts import SPLIT_CARD, VOCABULARY, read_json, read_table
from seqrec.training.checkpoint import Checkpoint

FILTERS = ("deduplicate", "k_core", "min_rating", "require_title", "newest_first")  # of a split card: events, and order
# Of a split card: where training events end, and the items that had no event at all.
SPLIT = ("protocol", "val_users", "valid_cut", "split_sha256", "absent", *FILTERS)


def split_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card of a model says of its split, from the card of the prepared dataset."""
    return {name: card[name] for name in SPLIT if name in card}


def held_out_now(checkpoint: Checkpoint, data: Path) -> str:
    """Return why training events of the model may now be validation or test events; empty if they cannot.

    The log that is prepared in the folder `data` may have grown since the training. It is assumed that no remaining
    user has lost an event.
    """
    before, now = checkpoint.card.get("split", {}), read_json(data / SPLIT_CARD)
    if not {"protocol", "val_users", "split_sha256"} <= before.keys():
        return "its model card does not name the split that it was trained on"
    if before["split_sha256"] == now["split_sha256"]:
        return ""
    protocols = [split["protocol"].replace("LOO-101", "LOO-full") for split in (before, now)]
    if protocols[0] != protocols[1]:
        return f"it was trained under prepare.protocol {before['protocol']}, and the dataset has {now['protocol']}"
    if protocols[0] == "temporal":
        if now["valid_cut"] < before.get("valid_cut", math.inf):
            return "its training events end after the validation events of the dataset begin"
        return ""
    if protocols[0] == "RATIO-full" or before["val_users"]:
        return "under RATIO-full or prepare.val_users, training events may become validation events when a log grows"
    changed = [name for name in FILTERS if before.get(name, False) != now.get(name, False)]
    if changed:
        names = ", ".join(changed)
        return f"its training had other settings of the data ({names}), so some training events may now be held out"
    if now["k_core"]["user"] < 3:
        return f"under {now['protocol']}, the second event of a user trains until there is a third: min_user_events < 3"
    gone = len(_present(checkpoint.vocabulary, before) - _present(read_table(data / VOCABULARY), now))
    if gone:
        return f"{gone} of its items no longer exist, so under {now['protocol']} earlier events are held out"
    return ""


def _present(vocabulary: pa.Table, split: Mapping[str, Any]) -> set[str]:
    """Return the ids of the items that have events, which with `prepare.extend` not all have."""
    absent = pa.array(split.get("absent", ()), pa.int32())
    return set(vocabulary["item_id"].filter(pc.invert(pc.is_in(vocabulary["item"], value_set=absent))).to_pylist())
