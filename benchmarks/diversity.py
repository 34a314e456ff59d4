"""What diversity and exploration cost: accuracy, coverage and likeness of the lists of the test cases.

    python -m benchmarks.diversity --saved artifacts/flash4rec/finetuned --sequences data/sequences

The lists are those that the service would show: ten items after each test history, seen items left out as the model was
evaluated. Likeness is the mean cosine of the item vectors of two items of a list.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.meter import markdown
from seqrec.data import sequences
from seqrec.evaluation import metrics
from seqrec.serving.recommender import Recommender, Request

K = 10
RULES: tuple[dict[str, Any], ...] = (
    {},
    *({"diversity": share} for share in (0.1, 0.2, 0.3, 0.5, 0.7)),
    *({"explore": share} for share in (0.05, 0.1, 0.2)),
)


def lists(recommender: Recommender, asked: list[dict[str, Any]], rule: dict[str, Any]) -> Tensor:
    """Return the numbers of the items shown to each of those who asked, (cases, K)."""
    found = []
    for first in range(0, len(asked), 256):
        answers = recommender.answer([Request(**who, k=K, **rule) for who in asked[first : first + 256]])
        found += [[recommender.items[item] for item in answer.items] for answer in answers]
    return torch.tensor(found)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--sequences", type=Path, required=True, help="the prepared dataset it was trained on")
    flags = parser.parse_args()
    torch.manual_seed(0)
    data, item_ids = sequences.load(flags.sequences), sequences.read_vocabulary(flags.sequences)[0]
    recommender, cases = Recommender.load(flags.saved), sequences.cases(data, "test")
    bounds = zip(data.start[cases.user].tolist(), cases.position.tolist(), strict=True)
    users = sequences.read_users(flags.sequences)
    asked = [
        {"user": users[user], "history": [item_ids[item - 1] for item in data.items[first:stop].tolist()]}
        for user, (first, stop) in zip(cases.user.tolist(), bounds, strict=True)
    ]
    target_C = data.items[cases.position]
    unit_VD = F.normalize(recommender.item_vectors, dim=1)
    rows = []
    for rule in RULES:
        items_CK = lists(recommender, asked, rule)
        hit_CK = items_CK == target_C.unsqueeze(1)
        gain_K = 1 / torch.log2(torch.arange(2.0, K + 2))
        beyond = metrics.list_metrics(items_CK, data.count)
        unit_CKD = unit_VD[items_CK]
        likeness = ((unit_CKD @ unit_CKD.mT).sum((1, 2)) - K).mean().item() / (K * (K - 1))
        name = ", ".join(f"{key} {value}" for key, value in rule.items()) or "the best items"
        accuracy = (hit_CK * gain_K).sum(1).mean().item()
        figures = (accuracy, hit_CK.any(1).float().mean().item(), beyond["coverage"], beyond["tail_share"], likeness)
        rows.append((name, *(f"{figure:.4f}" for figure in figures)))
    print(markdown(("list", "NDCG@10", "Recall@10", "coverage", "tail share", "likeness"), rows))


if __name__ == "__main__":
    main()
