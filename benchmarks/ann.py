"""Approximate search against scoring all items, by catalogue size: time of a query alone, recall, time to build.

    OMP_NUM_THREADS=1 python -m benchmarks.ann --items 100000 300000

Items are random points around random centres, which is easier to search than noise, and queries other points of the
same clouds. Both ways are those of `Recommender`, without the model's own pass.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from benchmarks import meter
from seqrec.models.base import Batch, Catalogue
from seqrec.models.sasrec import SASRec, SASRecOptions
from seqrec.serving.approximate_search import ApproximateRecommender
from seqrec.serving.recommender import Recommender

WIDTH, CENTRES, SPREAD = 64, 1_000, 0.5
QUERIES, TOP = 200, 10


class Asked(SASRec):
    """A model that has its queries already: what is timed is the search."""

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return the query whose number is the user's."""
        return self.query_ND[batch.user].unsqueeze(1)


def clouds(number: int, centre_CD: Tensor) -> Tensor:
    """Return points (number, D) around the centres."""
    drawn = centre_CD[torch.randint(len(centre_CD), (number,))]
    return drawn + SPREAD * torch.randn_like(drawn)


def ask(recommender: Recommender) -> tuple[list[set[int]], float]:
    """Return the best items of each query, and the median seconds of one."""
    found, seconds = [], []
    nothing = torch.zeros(1, 1)
    for user in range(QUERIES):  # one at a time, as a service at one connection asks
        batch = Batch(nothing.long(), nothing, torch.tensor([user]))
        began = time.perf_counter()
        ((_, best),) = recommender._top(batch, [[]], TOP)
        seconds.append(time.perf_counter() - began)
        found.append(set(best))
    return found, sorted(seconds)[QUERIES // 2]


@torch.no_grad()
def measure(items: int, expansions: list[int]) -> list[list[str]]:
    """Return rows of the table for a catalogue of `items`."""
    centre_CD = torch.randn(CENTRES, WIDTH)
    model = Asked(SASRecOptions(d_model=WIDTH), Catalogue(items, QUERIES, 1))
    model.items.weight[1:] = clouds(items, centre_CD)
    model.query_ND = clouds(QUERIES, centre_CD)
    ids, counts = [str(item) for item in range(1, items + 1)], torch.ones(items + 1)
    exact = Recommender(model, ids, counts, [], filter_seen=True)
    best, seconds = ask(exact)
    rows = [[f"{items:,}", "all scored", f"{seconds * 1e3:.2f}", "1", ""]]
    searched = ApproximateRecommender(model, ids, counts, [], filter_seen=True)
    began = time.perf_counter()
    searched.build(expansions[0])
    built = time.perf_counter() - began
    for expansion in expansions:
        searched.index.expansion_search = expansion
        found, seconds = ask(searched)
        recall = sum(len(a & b) for a, b in zip(found, best, strict=True)) / (TOP * QUERIES)
        rows.append([f"{items:,}", f"--ann {expansion}", f"{seconds * 1e3:.2f}", f"{recall:.3f}", f"{built:.0f}"])
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 300_000])
    parser.add_argument("--expansions", type=int, nargs="+", default=[64, 256])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for items in arguments.items for row in measure(items, arguments.expansions)]
    print(meter.machine(torch.get_num_threads()), "\n")
    print(meter.markdown(["items", "search", "median ms of a query", f"recall@{TOP}", "s to build"], rows))


if __name__ == "__main__":
    main()
