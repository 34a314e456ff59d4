"""The reported metrics, slices and recommendation lists, computed from ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from seqrec import artifacts
from seqrec.artifacts import write_json, write_table
from seqrec.config import EvaluateConfig
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import intervals, metrics, ranking
from seqrec.evaluation.ranking import Ranking, Scorer

LENGTHS = {"1-10": (1, 10), "11-50": (11, 50), "51+": (51, torch.inf)}


def report(
    scorer: Scorer,
    data: Sequences,
    directory: Path,
    config: EvaluateConfig,
    facts: dict[str, float],
    *,
    filter_seen: bool = True,
    valid: Scorer | None = None,
    count: Tensor | None = None,
) -> dict[str, float]:
    """Rank every validation and test case, and write metrics, cases and recommendations to `directory`.

    `valid` ranks the validation cases if `scorer` was trained on them or has settings that were chosen on them. `count`
    (1 + V,) are the events of each item that `scorer` was trained on, if those are more than the training events: on
    test, they say which items are new or popular, and rank the cases without a history.

    Names of metrics: `test/ndcg@10`, with its interval `/low` and `/high`; its slices `/popularity=head|tail|cold` (of
    the target), `/length=1-10|11-50|51+` (of the history) and, if there are any, `/repeat=yes|no` (targets in the
    history), each with an interval; `test/unfiltered/...` and `test/filtered/...`, with seen items kept and removed;
    under protocol LOO-101 `test/101/...`, which ranks the target only among the negatives of the split and is not
    comparable with the others. `facts` are added unchanged.

    Raises:
        ValueError: a score is not finite, or a metric is impossible.
    """
    values: dict[str, float] = {"filter_seen": int(filter_seen), "refit": int(config.refit != "none")}
    tables = []
    for split in ("valid", "test"):
        chosen = sequences.cases(data, split)
        chosen_scorer = valid if split == "valid" and valid is not None else scorer
        known = data if split == "valid" or count is None else replace(data, count=count)
        ranked = ranking.rank(
            chosen_scorer, known, chosen, filter_seen=filter_seen, top_k=config.top_k, name=directory.name
        )
        rank = ranked.rank if filter_seen else ranked.rank_unfiltered
        found = _accuracy(rank, data.num_items) | _uncertainty(rank, chosen, config)
        found |= _slices(rank, known, chosen, config)
        others = {"filtered": ranked.rank, "unfiltered": ranked.rank_unfiltered}
        if data.negatives is not None:
            others["101"] = ranked.rank_sampled
        for name, other in others.items():
            means = _accuracy(other, data.num_items)
            found |= {f"{name}/{key}": means[key] for key in ("ndcg@10", "recall@10", "mrr")}
        lists = metrics.list_metrics(ranked.top[:, :10], known.count)
        found |= {f"{name}@10": value for name, value in lists.items()}
        found |= {"cases": len(chosen), "tied_cases": int((ranked.ties > 0).sum())}
        values |= {f"{split}/{name}": value for name, value in found.items()}
        tables.append(case_table(split, data, chosen, rank, ranked.ties))
        if split == "test":
            write_table(directory / artifacts.RECOMMENDATIONS, _recommendations(chosen, ranked))
    metrics.require_possible(values | facts, directory.name)
    write_table(directory / artifacts.CASES, pa.concat_tables(tables))
    values |= facts
    write_json(directory / artifacts.METRICS, values)
    return values


def _accuracy(rank: Tensor, num_items: int) -> dict[str, float]:
    return metrics.from_histogram(metrics.histogram(rank, num_items))


def _uncertainty(rank: Tensor, chosen: Cases, config: EvaluateConfig) -> dict[str, float]:
    user = chosen.user.cpu().numpy()
    value = metrics.ndcg(rank.cpu().numpy(), 10)
    interval = intervals.bootstrap(value, user, resamples=config.bootstrap, seed=config.seed)
    by_user = np.bincount(user, weights=value)[np.unique(user)] / np.bincount(user)[np.unique(user)]
    return {
        "ndcg@10/low": interval.low,
        "ndcg@10/high": interval.high,
        "ndcg@10/per_user": float(by_user.mean()) if len(by_user) else 0.0,
    }


def _slices(rank: Tensor, data: Sequences, chosen: Cases, config: EvaluateConfig) -> dict[str, float]:
    values = {}
    for name, mask in (length_slices(chosen.position - data.start[chosen.user]) | target_slices(data, chosen)).items():
        values[f"ndcg@10/{name}"] = _accuracy(rank[mask], data.num_items)["ndcg@10"]
        value, user = metrics.ndcg(rank[mask].cpu().numpy(), 10), chosen.user[mask].cpu().numpy()
        interval = intervals.bootstrap(value, user, resamples=config.bootstrap, seed=config.seed)
        values |= {f"ndcg@10/{name}/low": interval.low, f"ndcg@10/{name}/high": interval.high}
        values[f"cases/{name}"] = int(mask.sum())
    return values


def length_slices(length_C: Tensor) -> dict[str, Tensor]:
    """Return bool (C,) by slice that is not empty: the cases whose history has so many events."""
    return _filled({f"length={name}": (length_C >= low) & (length_C <= high) for name, (low, high) in LENGTHS.items()})


def target_slices(data: Sequences, chosen: Cases) -> dict[str, Tensor]:
    """Return bool (C,) by slice that is not empty: the target is popular, rare, new to training, or in the history."""
    target, repeat = data.items[chosen.position].long(), ranking.repeats(data, chosen)
    head, cold = metrics.head_items(data.count)[target], data.count[target] == 0
    slices = {"popularity=head": head & ~cold, "popularity=tail": ~head & ~cold, "popularity=cold": cold}
    return _filled(slices) | (_filled({"repeat=yes": repeat, "repeat=no": ~repeat}) if repeat.any() else {})


def _filled(slices: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask for name, mask in slices.items() if mask.any()}


def case_table(split: str, data: Sequences, chosen: Cases, rank: Tensor, ties: Tensor) -> pa.Table:
    """Return the ranks and ties of some cases in the form of cases.parquet."""
    columns = {
        "split": np.full(len(chosen), split),
        "user": (chosen.user + 1).int().cpu().numpy(),
        "position": (chosen.position - data.start[chosen.user]).int().cpu().numpy(),
        "target": data.items[chosen.position].cpu().numpy(),
        "rank": rank.cpu().numpy(),
        "ties": ties.int().cpu().numpy(),
    }
    return pa.table(columns, schema=artifacts.CASES_SCHEMA)


def _recommendations(chosen: Cases, ranked: Ranking) -> pa.Table:
    """Return the recommendation list of each user's first case."""
    user = chosen.user.cpu()
    first = torch.ones(len(user), dtype=torch.bool)
    first[1:] = user[1:] != user[:-1]
    item, score = ranked.top.cpu()[first], ranked.score.cpu()[first]
    position = torch.arange(1, item.shape[1] + 1).expand_as(item)
    present = item > 0
    columns = {
        "user": (user[first] + 1).unsqueeze(1).expand_as(item)[present].int().numpy(),
        "rank": position[present].int().numpy(),
        "item": item[present].int().numpy(),
        "score": score[present].numpy(),
    }
    return pa.table(columns, schema=artifacts.RECOMMENDATIONS_SCHEMA)
