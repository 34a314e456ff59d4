"""PCTM under the protocol of its public code, and what each difference to ours is worth, on Beauty (22,363 users).

    python -m benchmarks.pctm_public --file order_only.txt.gz --ours interactions.csv.gz

The values, the protocol and the figures to meet (.0635 NDCG@10, .0998 recall@10) are those of
github.com/spotify-research/sequential-capacity-probes (docs/PROTOCOL.md, configs/table1.json): counts of all but each
user's last event, which is the target; users whose target is not among the counted items are dropped; equal scores are
ordered by the SHA-256 of the item's id; the newest 50 events vote with 0.6^j. The code is ours.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import meter
from seqrec.config import CountsConfig
from seqrec.counts import term
from seqrec.data.sequences import Sequences, seen, window

TAU, EVENTS, ROWS = 11_250, 50, 512
PUBLIC = {"kernel": "root", "window": 10, "rho": 0.6, "events": EVENTS, "popularity": -0.04, "targets": 1 << 20}
LADDER = (  # (row, file, events left out of the counts, ties, cold targets)
    ("the public protocol", "file", 1, "hash", "dropped"),
    ("ties in the middle", "file", 1, "middle", "dropped"),
    ("cold targets are misses", "file", 1, "middle", "missed"),
    ("equal days in our order", "ours", 1, "middle", "missed"),
    ("counts stop two before the end", "ours", 2, "middle", "missed"),
    ("two before the end, their order", "file", 2, "middle", "missed"),
)


def read_lines(path: Path) -> list[list[str]]:
    """Return the items of each user of a file `user item item ...`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.split()[1:] for line in file]


def read_events(path: Path) -> list[list[str]]:
    """Return the items of each user of a file with the columns user_id, item_id, timestamp; stable in time."""
    users: dict[str, list[tuple[int, str]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            users.setdefault(row["user_id"], []).append((int(row["timestamp"]), row["item_id"]))
    return [[item for _, item in sorted(events, key=lambda event: event[0])] for events in users.values()]


def as_sequences(users: Sequence[Sequence[str]], left_out: int) -> tuple[Sequences, list[str]]:
    """Return the dataset whose training part ends `left_out` events before the end, and its items' ids.

    The catalogue is what is in that part; item 0 stands for all others.
    """
    ids = sorted({item for items in users for item in items[:-left_out]}, key=int)
    number = {item: place for place, item in enumerate(ids, start=1)}
    length = torch.tensor([len(items) for items in users])
    stop = length.cumsum(0)
    flat = torch.tensor([number.get(item, 0) for items in users for item in items], dtype=torch.int32)
    train = torch.tensor([place < len(items) - left_out for items in users for place in range(len(items))])
    count = torch.bincount(flat[train], minlength=len(ids) + 1)
    start = stop - length
    return Sequences(
        flat, torch.zeros(len(flat), dtype=torch.int64), start, stop - left_out, stop - 1, stop, count, {}
    ), ids


def figures(users: Sequence[Sequence[str]], left_out: int, ties: str, cold: str) -> tuple[float, float]:
    """Return NDCG@10 and recall@10 of PCTM with the published values."""
    data, ids = as_sequences(users, left_out)
    config = CountsConfig(**PUBLIC, smoothing=TAU / data.num_items)
    digest = [hashlib.sha256(item.encode()).digest() for item in ids]
    order = torch.zeros(len(ids) + 1, dtype=torch.int64)
    order[1 + torch.tensor(sorted(range(len(ids)), key=lambda place: digest[place]))] = torch.arange(len(ids))
    place = torch.cat(list(_places(data, term.build(data, config), order if ties == "hash" else None)))
    number = len(place) if cold == "dropped" else data.num_users
    hit = place[place <= 10]
    return float((1 / torch.log2(1 + hit)).sum() / number), float(len(hit) / number)


def _places(data: Sequences, counts: term.CountTerm, order_V: Tensor | None) -> Iterator[Tensor]:
    """Yield the places of the targets that are in the catalogue; equal scores by `order_V`, or in the middle."""
    last = data.stop - 1
    warm = (data.items[last] > 0).nonzero().squeeze(1)
    for user in warm.split(ROWS):
        stop, target = last[user], data.items[last[user]].long().unsqueeze(1)
        score = counts.adder(window(data, user, stop, EVENTS).items)(torch.zeros(len(user), len(data.count)), 0)
        goal = score.gather(1, target)
        row, item = seen(data, user, stop)
        score[row, item] = score[:, 0] = float("-inf")  # a target seen before cannot be found either
        above, equal = score > goal, score == goal
        before = (
            (equal.sum(1).clamp(min=1) - 1) / 2 if order_V is None else (equal & (order_V < order_V[target])).sum(1)
        )
        place = 1 + above.sum(1) + before.float()
        yield place.masked_fill(~equal.gather(1, target).squeeze(1), float("inf"))


def main() -> None:
    """Print the ladder as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--ours", type=Path, required=True)
    arguments = parser.parse_args()
    users = {"file": read_lines(arguments.file), "ours": read_events(arguments.ours)}
    rows = []
    for name, file, left_out, ties, cold in LADDER:
        ndcg, recall = figures(users[file], left_out, ties, cold)
        rows.append((name, f"{ndcg:.4f}", f"{recall:.4f}"))
    print(meter.markdown(("PCTM, the published values", "NDCG@10", "recall@10"), rows))


if __name__ == "__main__":
    main()
