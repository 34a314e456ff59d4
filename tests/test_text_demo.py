"""The demonstration of text: what few users give, items that are new to them, and items described in a request."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from scripts import text_demo as demo
from seqrec.config import load
from seqrec.data import sequences

SMALL = {"d_model": 16, "d_inner": 32, "layers": 1, "heads": 2, "length": 8, "max_tokens": 64, "pooling": "mean"}
IDS = {"d_model": 16, "layers": 1, "heads": 2, "length": 8, "dropout": 0.2}


def test_few_users_new_items_and_described_ones_are_told_apart(prepared, tmp_path):
    out, config_file = tmp_path / "out", tmp_path / "demo.yaml"
    start = str(out / "artifacts" / "recformer_000" / "initial")
    text = SMALL | {"frozen_words": []}
    few = {"user_share": 0.05, "epochs": 1}
    models = {
        "recformer_000": {"architecture": "recformer", "options": text, "finetune": {"epochs": 0}},
        "recformer_005": {"architecture": "recformer", "options": text | {"start": start}, "finetune": few},
        "sasrec_005": {"architecture": "sasrec", "options": IDS, "finetune": few},
    }
    content = {"datasets": {"synthetic": {}, "another": {}}, "dataset": "another", "filter_seen": False}
    content |= {"pretrain": {"epochs": 1, "prefixes_per_user": 1}, "evaluate": {"bootstrap": 100}, "models": models}
    config_file.write_text(yaml.safe_dump(content))

    result = demo.demo(config_file=config_file, out=out, dataset="synthetic", data=prepared.parent, requests=5)

    assert result["dataset"] == load(out / "params.yaml").dataset == "synthetic"
    rows = {row["model"]: row for row in result["rows"]}
    assert [row["share"] for row in result["rows"]] == [0, 0.05, 0.05, 0.05]
    assert rows.keys() == {*models, "pctm_005"}
    data = sequences.load(prepared)
    assert rows["recformer_000"]["new"]["cases"] == len(sequences.cases(data, "test"))  # nobody has trained
    assert 0 < rows["sasrec_005"]["new"]["cases"] < len(sequences.cases(data, "test"))
    assert rows["recformer_000"]["new"]["ndcg@10"] == pytest.approx(rows["recformer_000"]["test/ndcg@10"])
    for row in result["described"]:
        assert row["known"] == row["described"]
    assert json.loads((out / "text_demo.json").read_text()) == result
    assert "| 5% | sasrec_005 |" in (out / "text_demo.md").read_text()


def test_what_some_users_leave_is_counted_and_the_cases_stay(prepared):
    data = sequences.load(prepared)
    trained_U = torch.arange(data.num_users) % 10 == 0

    few = demo.restricted(data, trained_U)

    kept = [data.items[a:b] for a, b, t in zip(data.start, data.train_stop, trained_U, strict=True) if t]
    assert few.count.tolist() == torch.bincount(torch.cat(kept), minlength=len(data.count)).tolist()
    for split in ("valid", "test"):
        assert torch.equal(sequences.cases(few, split).position, sequences.cases(data, split).position)
