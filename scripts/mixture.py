"""Do trained networks rank better together, and with a memory of the training positions?

The networks of all runs score by their mean log-probability, and a count term is chosen for the mixture as for a model.
With --memory, that share of the probability comes from the training positions (the kNN-LM of Khandelwal et al. 2020,
arXiv:1911.00172): for each network, the --nearest ones, by the cosine of their queries with that of the case, vote for
the items that followed, with weights proportional to exp(cosine / --temperature). For networks that read left to right,
whose queries do not depend on the place in the window.

    python scripts/mixture.py runs/one runs/two --model flash4rec --memory 0.3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqrec.config import CountsConfig
from seqrec.counts.search import LAST_EVENT, Tables, choose, fold_scorer
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import intervals, metrics, ranking
from seqrec.evaluation.ranking import ScoreBlocks, Scorer
from seqrec.models.base import SequenceModel
from seqrec.training.checkpoint import load_checkpoint

ROWS, KEYS = 256, 200_000  # cases, and training positions, in memory at once
SPLITS = ("valid", "test")


def queries(model: SequenceModel, data: Sequences, user: Tensor, stop: Tensor, positions: int = 1) -> Tensor:
    """Return the queries (B, P, D) at the last `positions` events before `stop` (B,) of each user, normalised to 1."""
    longest = int((stop - data.start[user]).clamp(max=model.options.length).max())
    width = sequences.padded_width(max(longest, positions), model.options.history)
    query = model(model.asked(sequences.window(data, user, stop, width)), last=positions == 1)
    return F.normalize(query[:, -positions:].float(), dim=-1)


def memory(model: SequenceModel, data: Sequences) -> tuple[Tensor, Tensor]:
    """Return the queries (N, D) of all training targets, and these items (N,); before each, half a window is read."""
    half = max(1, model.options.length // 2)
    keys, items = [], []
    last = data.train_stop - 1  # the last target of each user
    while (left := (last > data.start).nonzero().squeeze(1)).numel():
        for user in left.split(ROWS):
            stop = last[user]
            event = stop.unsqueeze(1) + torch.arange(1 - half, 1)  # the targets of these positions
            real = event > data.start[user].unsqueeze(1)
            keys.append(queries(model, data, user, stop, half)[real])
            items.append(data.items[event[real]].long())
        last = last - half
    return torch.cat(keys), torch.cat(items)


def votes(
    query_CD: Tensor, key_ND: Tensor, item_N: Tensor, num_items: int, *, nearest: int, temperature: float
) -> Tensor:
    """Return (C, 1 + V): the share of the votes of the `nearest` keys that each item gets."""
    shares = []
    for query in query_CD.split(ROWS):
        best, place = query.new_empty(len(query), 0), torch.empty(len(query), 0, dtype=torch.int64)
        for first in range(0, len(key_ND), KEYS):
            near = query @ key_ND[first : first + KEYS].T
            near, index = near.topk(min(nearest, near.shape[1]))
            best, kept = torch.cat([best, near], 1).topk(min(nearest, best.shape[1] + near.shape[1]))
            place = torch.cat([place, index + first], 1).gather(1, kept)
        weight = torch.softmax(best / temperature, 1)
        shares.append(weight.new_zeros(len(query), num_items + 1).scatter_add_(1, item_N[place], weight))
    return torch.cat(shares)


def predictions(
    model: SequenceModel, data: Sequences, cases: Cases, past: tuple[Tensor, Tensor] | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return the log-probability (C, V) of every item in each case, and its share (C, V) of the votes of `past`."""
    blocks = ranking.model_scorer(model)(data, cases.user, cases.position)()
    log_CV = torch.log_softmax(torch.cat([score for _, score in blocks], 1), 1)
    if past is None:
        return log_CV, torch.zeros(())
    pairs = zip(cases.user.split(ROWS), cases.position.split(ROWS), strict=True)
    asked = torch.cat([queries(model, data, user, stop)[:, 0] for user, stop in pairs])
    return log_CV, votes(asked, *past, data.num_items, **how)[:, 1:]


@torch.no_grad()
def mixed(
    models: Sequence[SequenceModel], data: Sequences, cases: dict[str, Cases], *, share: float, **how: Any
) -> dict[str, Tensor]:
    """Return, by split, the log-probability (C, V) of every item: `share` of it from the memory.

    Args:
        models: the networks, whose log-probabilities and votes are averaged.
        data: the prepared data.
        cases: what to predict, by split.
        share: share of the probability that the votes have.
        how: `nearest` and `temperature` of `votes`.
    """
    logs, voted = dict.fromkeys(cases, torch.zeros(())), dict.fromkeys(cases, torch.zeros(()))
    for model in models:
        past = memory(model, data) if share else None
        for split, chosen in cases.items():
            log_CV, vote_CV = predictions(model, data, chosen, past, **how)
            logs[split], voted[split] = logs[split] + log_CV, voted[split] + vote_CV
    found = {}
    for split in cases:
        found[split] = torch.log_softmax(logs[split] / len(models), 1)
        if share:
            vote_CV = voted[split] / len(models)
            found[split] = torch.log((1 - share) * found[split].exp() + share * vote_CV + 1e-12)
    return found


def scorer_of(scores: dict[str, Tensor], cases: dict[str, Cases]) -> Scorer:
    """Return the scorer that has the scores of these cases."""
    position, order = torch.cat([cases[split].position for split in SPLITS]).sort()
    score = torch.cat([scores[split] for split in SPLITS])[order]

    def scorer(data: Sequences, user: Tensor, stop: Tensor) -> ScoreBlocks:
        return lambda: iter([(1, score[torch.searchsorted(position, stop)])])

    return scorer


def main() -> None:
    """Print the figures of the mixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of `seqrec run`, of one split")
    parser.add_argument("--model", default="flash4rec")
    parser.add_argument("--memory", type=float, default=0.0, help="share of the training positions; 0: none")
    parser.add_argument("--nearest", type=int, default=1_000)
    parser.add_argument("--temperature", type=float, default=0.05)
    flags = parser.parse_args()
    data = sequences.load(flags.runs[0] / "data/sequences")
    cases = {split: sequences.cases(data, split) for split in SPLITS}
    for run in flags.runs:
        found = sequences.load(run / "data/sequences").card["split_sha256"]
        if found != data.card["split_sha256"]:
            raise SystemExit(f"{run} has another split than {flags.runs[0]}")
    folders = [run / "artifacts" / flags.model / "finetuned" for run in flags.runs]
    models = [load_checkpoint(folder).model.eval() for folder in folders]
    how = {"share": flags.memory, "nearest": flags.nearest, "temperature": flags.temperature}
    scores = mixed(models, data, cases, **how)
    base, tables = scorer_of(scores, cases), Tables(data)
    start = CountsConfig(alpha=0.0)
    choice = choose(base, tables, data, filter_seen=True, start=start, again=LAST_EVENT, further=["ease"])
    counted = {
        "valid": fold_scorer(base, tables, choice.folds, data.device),
        "test": tables.scorer(base, choice.values, data.device),
    }
    print("| counts | valid | test [95 %] | test Recall@10 |\n|---|--:|--:|--:|")
    for name, scorers in (("no", dict.fromkeys(SPLITS, base)), ("yes", counted)):
        rank = {s: ranking.rank(scorers[s], data, cases[s], filter_seen=True, both=False).rank for s in SPLITS}
        ndcg = {split: metrics.ndcg(found.numpy(), 10) for split, found in rank.items()}
        test = intervals.bootstrap(ndcg["test"], cases["test"].user.numpy(), resamples=1_000, seed=42)
        recall = (rank["test"] <= 10).double().mean()
        print(f"| {name} | {ndcg['valid'].mean():.4f} | {str(test).replace('+', '')} | {recall:.4f} |")


if __name__ == "__main__":
    main()
