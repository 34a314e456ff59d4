"""Compares a model that reads text with a model of ids and with PCTM, with none, some and all of the users.

    python scripts/text_demo.py --config-file configs/recformer/text-demo.yaml --out runs/text-demo

It runs the config as `seqrec run` does, counts PCTM over the same users, looks at the items that are new to them, and
describes known items in requests as if they were new. OUT receives the tables, `text_demo.md` and `text_demo.json`.
A later call repeats no training.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqrec.artifacts import CASES, ITEMS, METRICS, read_json, read_table, write_json, write_text
from seqrec.commands.run import run
from seqrec.config import Params, load
from seqrec.counts.search import Tables
from seqrec.data import sequences
from seqrec.data.item_tokens import read_texts
from seqrec.data.sequences import Sequences
from seqrec.evaluation import intervals, metrics
from seqrec.models import REGISTRY
from seqrec.models.optional import ReadsTokens
from seqrec.serving.recommender import Recommender
from seqrec.stages.baselines import write
from seqrec.stages.evaluate import evaluate
from seqrec.training.batches import trained_users
from seqrec.training.checkpoint import catalogue_files, load_checkpoint

NEW, NONSENSE = "described in the request", "qqqq zzz"
Row = dict[str, Any]


def demo(
    *, config_file: Path, out: Path, dataset: str = "", data: Path | None = None, requests: int = 100
) -> dict[str, Any]:
    """Run the config; return and write the figures for few users, for new items and for described items.

    Args:
        config_file: its models differ in architecture and in `finetune.user_share`; no epoch is no user.
        out: as for `seqrec run`.
        dataset: as for `seqrec run`.
        data: as for `seqrec run`.
        requests: test cases whose item is described.
    """
    began, params = time.monotonic(), load(config_file)
    params = replace(params, dataset=dataset or params.dataset)
    run(config_file=config_file, out=out, dataset=dataset, data=data)
    folder = (data or out / "data") / "sequences"
    prepared = sequences.load(folder)
    rows = curve(params, folder, out)
    kinds = {name: REGISTRY[params.model(name).architecture] for name in params.leaderboard}
    readers = [name for name, kind in kinds.items() if issubclass(kind, ReadsTokens)]
    result = {
        "dataset": params.dataset,
        "split_sha256": prepared.card["split_sha256"],
        "seed": params.section("finetune").seed,
        "items": prepared.num_items,
        "users": prepared.num_users,
        "rows": rows,
        "described": [described(name, out / "artifacts" / name, folder, prepared, requests) for name in readers],
        "seconds": time.monotonic() - began,
    }
    write_json(out / "text_demo.json", result)
    write_text(out / "text_demo.md", markdown(result))
    return result


def curve(params: Params, folder: Path, out: Path) -> list[Row]:
    """Return a row for each model, and for PCTM with the same users; a text model's comes first."""
    prepared, reports = sequences.load(folder), out / "reports"
    shares: dict[float, list[str]] = {}
    known = {}
    for name in params.leaderboard:
        config = params.section("finetune", model=name)
        share = config.user_share if config.epochs else 0.0
        shares.setdefault(share, []).append(name)
        known[share] = restricted(prepared, trained_users(prepared, config) & (share > 0))
    rows = []
    for share, names in sorted(shares.items()):
        data = known[share]
        if share:
            names = [*names, _count(params, data, folder, out, share)]
        first = read_table(reports / names[0] / CASES)
        for name in names:
            rows.append({"share": share, **_row(reports / name, first, data, params.section("evaluate").seed)})
    return rows


def restricted(data: Sequences, trained_U: Tensor) -> Sequences:
    """Return the data with the training events of some users alone; the cases stay."""
    left = sequences.trained_until(data, data.train_stop.where(trained_U, data.start))
    return replace(left, card={**data.card, "cases": "last"})


def _count(params: Params, data: Sequences, folder: Path, out: Path, share: float) -> str:
    """Evaluate PCTM with the training events in `data` on the cases in `folder`; return the name of its report."""
    name = f"pctm_{100 * share:03.0f}"
    saved, filter_seen = out / "artifacts" / name / "finetuned", params.filters_seen()
    write("pctm", Tables(data), folder, saved, catalogue_files(folder, folder.parent / ITEMS), filter_seen=filter_seen)
    evaluate(
        model=name,
        sequences=folder,
        checkpoint=saved,
        report=out / "reports" / name,
        config=params.section("evaluate"),
        filter_seen=filter_seen,
    )
    return name


def _row(report: Path, first: pa.Table, data: Sequences, seed: int) -> Row:
    """Return the figures of a report, on all items and on items without an event in `data`, and the gain of `first`."""
    values, cases = read_json(report / METRICS), read_table(report / CASES)
    test = cases.filter(pa.compute.equal(cases["split"], "test"))
    row: Row = {"model": report.name, "seconds": values["train_seconds"]}
    row |= {name: values[name] for name in ("valid/ndcg@10", "test/ndcg@10", "test/recall@10")}
    row["interval"] = [values["test/ndcg@10/low"], values["test/ndcg@10/high"]]
    row["gain"] = _gain(first, cases, seed)
    new = _is_new(test, data)
    rank = test["rank"].to_numpy()[new]
    row["new"] = {
        "cases": len(rank),
        "ndcg@10": float(metrics.ndcg(rank, 10).mean()) if len(rank) else 0.0,
        "recall@10": float((rank <= 10).mean()) if len(rank) else 0.0,
    }
    if len(rank):
        row["new"]["gain"] = _gain(*(table.filter(pa.array(_is_new(table, data))) for table in (first, cases)), seed)
    return row


def _gain(first: pa.Table, other: pa.Table, seed: int) -> list[float]:
    return list(intervals.paired_gain(first, other, split="test", seed=seed))


def _is_new(cases: pa.Table, data: Sequences) -> NDArray[np.bool_]:
    return data.count.numpy()[cases["target"].to_numpy()] == 0


def described(name: str, artifacts: Path, folder: Path, prepared: Sequences, number: int) -> Row:
    """Return the ranks of test items as known items, and as unseen items that a request describes.

    A nonsense description shows that the description is read: such an item should rank like any other one.
    """
    recommender = Recommender.load(artifacts / "finetuned")
    attributes = load_checkpoint(artifacts / "finetuned").model.options.attributes
    texts = read_texts(folder.parent / ITEMS, recommender.item_ids, attributes)
    told = [
        dict(zip(texts, values, strict=True)) for values in zip(*(t.to_pylist() for t in texts.values()), strict=True)
    ]
    ranks = np.array(list(_ranks(recommender, told, _drawn(prepared, number), prepared)))
    figures = {}
    for column, kind in enumerate(("known", "described", "nonsense")):
        rank = ranks[:, column]
        figures[kind] = {"median rank": float(np.median(rank)), "recall@10": float((rank <= 10).mean())}
    return {"model": name, "requests": len(ranks), **figures}


def _drawn(prepared: Sequences, number: int) -> Sequence[tuple[int, int]]:
    """Return user and flat index of random test cases."""
    cases = sequences.cases(prepared, "test")
    chosen = random.Random(0).sample(range(len(cases)), min(number, len(cases)))
    return list(zip(cases.user[chosen].tolist(), cases.position[chosen].tolist(), strict=True))


def _ranks(
    recommender: Recommender, told: Sequence[Mapping[str, str]], cases: Sequence[tuple[int, int]], data: Sequences
) -> Iterator[tuple[int, int, int]]:
    """Yield the ranks of each case's item: as a known item, described as a new one, and described by nonsense."""
    ids = recommender.item_ids
    for user, position in cases:
        past = data.items[torch.arange(int(data.start[user]), position)].tolist()
        target = int(data.items[torch.tensor([position])])
        history = [ids[item - 1] for item in past]
        known = recommender.recommend(history, len(ids)).items
        rank = known.index(ids[target - 1]) if ids[target - 1] in known else len(ids)
        places = []
        for text in (told[target - 1], dict.fromkeys(told[target - 1], NONSENSE)):
            text = {column: value for column, value in text.items() if value} or {"title": NONSENSE}
            answer = recommender.recommend(history, len(ids), exclude=[ids[target - 1]], items_text={NEW: text})
            places.append(answer.items.index(NEW) + 1)
        yield rank + 1, places[0], places[1]


def markdown(result: Mapping[str, Any]) -> str:
    """Return the tables as a page."""
    head = (
        "# Text, ids and counts\n\n"
        f"{result['dataset']}: {result['users']} users, {result['items']} items, split {result['split_sha256'][:12]}, "
        f"seed {result['seed']}, {result['seconds'] / 60:.0f} minutes. NDCG@10 on all items. An item is new where none "
        "of the users in training has it before the split.\n"
    )
    columns = ["users in training", "model", "validation", "test [95 %]", "gain of the first [95 %]", "training s"]
    columns += ["new items: cases", "NDCG@10", "Recall@10"]
    lines = [columns, ["---"] * 2 + ["--:"] * (len(columns) - 2)]
    before = None
    for row in result["rows"]:
        first, before = row["share"] != before, row["share"]
        new = row["new"]
        lines.append(
            [
                f"{row['share']:.0%}",
                row["model"],
                f"{row['valid/ndcg@10']:.4f}",
                f"{row['test/ndcg@10']:.4f} [{row['interval'][0]:.4f}, {row['interval'][1]:.4f}]",
                "" if first else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*row["gain"]),
                f"{row['seconds']:.0f}",
                f"{new['cases']}",
                f"{new['ndcg@10']:.4f}",
                f"{new['recall@10']:.4f}",
            ]
        )
    text = head + "\n" + _table(lines)
    kinds = ("known", "described", "nonsense")
    lines = [["model", "requests", *(f"{kind}: median rank, Recall@10" for kind in kinds)], ["---"] + ["--:"] * 4]
    for row in result["described"]:
        cells = [f"{row[kind]['median rank']:.0f}, {row[kind]['recall@10']:.2f}" for kind in kinds]
        lines.append([row["model"], str(row["requests"]), *cells])
    text += "\nThe item of a test case as the model knows it, described in the request, and with nonsense instead:\n\n"
    return text + _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    """Run the demonstration and print its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dataset", default="")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.write(markdown(demo(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
