"""Whatever a user writes into a config is accepted, or refused with a message that names a key; never a traceback."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
from support import paths

from seqrec.commands.settings import check
from seqrec.config import ConfigError, from_dict, load

CONFIG: dict[str, Any] = {
    "dataset": "tiny",
    "sources": ["other"],
    "leaderboard": ["sasrec"],
    "ingest": {"retries": 2, "mirror": "folder"},
    "validate": {"min_rows": 3, "max_drift": 0.2, "min_date": "1990-01-01"},
    "prepare": {"min_user_events": 3, "protocol": "temporal", "test_share": 0.1, "seed": 1},
    "pretrain": {"seed": 1},
    "finetune": {"epochs": 3, "learning_rate": 0.01, "clip_norm": 1.0, "weight_decay": 0.0, "loss": "ce"},
    "filter_seen": True,
    "evaluate": {"bootstrap": 100, "top_k": 10},
    "register": {"min_gain": 0.0, "max_loss": 0.1, "tracking_uri": "sqlite:///m.db"},
    "serve": {"share": 0.1, "candidate": "models:/x/1", "rate": 2.0, "items": "items.parquet"},
    "tune": {"trials": 2, "spaces": {"sasrec": {"options.dropout": {"low": 0.1, "high": 0.5, "step": 0.1}}}},
    "kubernetes": {
        "resources": {"default": {"cpu": "1", "retries": 2}},
        "launch": {"finetune": {"processes": 2}},
        "environment": {"A": "b"},
        "user": 10,
    },
    "datasets": {
        "tiny": {"ingest": {"source": "csv", "interactions": "tiny.csv", "columns": {"user_id": "u"}}},
        "other": {"ingest": {"source": "amazon-2018", "category": "Gift_Cards"}, "options": {"length": 8}},
    },
    "models": {
        "sasrec": {"architecture": "sasrec", "options": {"d_model": 8, "dropout": 0.1}, "finetune": {"epochs": 2}}
    },
}
NUMBERS = (True, -1, 0, 0.5, 10**12, 10**30, 1e308, float("nan"), -float("inf"))
TEXTS = ("", "x", "../x", "1e-3", "tiny\n", b"bytes", datetime.date(2020, 1, 1))
LISTS = ([], [[]], [None], ["x", "x"])
MAPPINGS = ({}, {"x": 1}, {None: {}}, {"source": {}}, {"sasrec": None}, {"options": {"layers": "x"}})
VALUES = (None, *NUMBERS, *TEXTS, *LISTS, *MAPPINGS)


def parent(content: Any, path: tuple) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


def refusal(content: Any) -> str:
    """Return the message of the ConfigError, or nothing if there is none."""
    try:
        check(from_dict(content))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", paths(CONFIG), ids=".".join)
def test_a_wrong_value_is_refused_by_name(path):
    for value in VALUES:
        content = copy.deepcopy(CONFIG)
        parent(content, path)[path[-1]] = value
        said = refusal(content)
        assert not said or any(key in said for key in (*path, "options")), (value, said)


@pytest.mark.parametrize("path", paths(CONFIG), ids=".".join)
def test_a_missing_or_misspelt_key_is_refused_by_name_or_has_a_default(path):
    content = copy.deepcopy(CONFIG)
    value = parent(content, path).pop(path[-1])
    said = refusal(content)
    assert not said or any(key in said for key in path), said
    parent(content, path)[f"{path[-1]}_"] = value
    said = refusal(content)
    free = ("environment", "columns", "datasets", "models")  # whose keys the user names
    unused = (("tune", "spaces", "sasrec"), ("datasets", "other", "options"))  # by this run
    assert path[:-1] in unused or (path[-2:-1] and path[-2] in free) or f"{path[-1]}_" in said, said


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"dataset: [", b"\xff\xfe", b"\x00", b"- a", b"!!python/object:os.system x", b"? [1]\n: 2", b"tiny"),
        *(b"[" * 500, b"a: &a [*a]", b"dataset: &d {x: *d}", b"{? {} : 1}", b"2020-99-99"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "config.yaml")
