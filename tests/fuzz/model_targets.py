"""The card, weights and counts of a saved model, and the requests of the service."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import requests
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from support import make_model, prepare_rows, running, save, synthetic_rows

from fuzz.files import damaged
from fuzz.harness import Target
from fuzz.setting_targets import NASTY, paths
from seqrec.artifacts import COUNTS, MODEL_CARD, WEIGHTS, read_json, sha256, write_json
from seqrec.config import CountsConfig
from seqrec.serving import http
from seqrec.serving.recommender import Recommender, Request
from seqrec.training.checkpoint import load_model, save_model

NUMBERS = [10**7, 2**31, 2**63, -(2**31)]


@cache
def saved() -> Path:
    """Return the folder of a small model."""
    folder = Path(tempfile.mkdtemp())
    save_model(folder, make_model("sasrec"), {"filter_seen": True})
    return folder


@st.composite
def folders(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return card and weights, changed in one or two places."""
    card = json.loads((saved() / MODEL_CARD).read_text())
    weights = (saved() / WEIGHTS).read_bytes()
    for _ in range(draw(st.integers(0, 2))):
        *above, key = draw(st.sampled_from(paths(card) or [("unheard of",)]))
        inner = card
        for name in above:
            inner = inner[name]
        if draw(st.booleans()):
            inner.pop(key, None)
        else:
            inner[key] = copy.deepcopy(draw(st.sampled_from([*NASTY, *NUMBERS])))
    if draw(st.integers(0, 4)) == 0:
        weights = draw(damaged(weights))
    card["weights_sha256"] = hashlib.sha256(weights).hexdigest()  # whoever tampers can write the right digest
    text = json.dumps({str(key): value for key, value in card.items()}, default=str).encode()
    if draw(st.integers(0, 4)) == 0:
        text = draw(damaged(text))
    return text, weights


def load(files: tuple[bytes, bytes]) -> None:
    """Load the model."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(saved(), folder, dirs_exist_ok=True)
        Path(folder, MODEL_CARD).write_bytes(files[0])
        Path(folder, WEIGHTS).write_bytes(files[1])
        load_model(Path(folder))


@cache
def prepared() -> Path:
    """Return the folder of a small prepared dataset."""
    return prepare_rows(Path(tempfile.mkdtemp()), synthetic_rows())


@cache
def counting() -> Path:
    """Return the folder of a small model with counts."""
    return save("sasrec", prepared(), Path(tempfile.mkdtemp()), CountsConfig(events=3), {"length": 8})


@st.composite
def counts(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Return the entry `counts` of a card, and the file of its tensors, changed in one or two places."""
    entry = read_json(counting() / MODEL_CARD)["counts"]
    good = load_file(counting() / COUNTS)
    tensors = dict(good)
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.integers(0, 2)) == 0:
            key = draw(st.sampled_from([*sorted(set(entry) - {"sha256"}), "folds"]))
            entry[key] = copy.deepcopy(draw(st.sampled_from([*NASTY, *NUMBERS, "0.5", [{}], 1e300])))
            continue
        name = draw(st.sampled_from(sorted(good)))
        tensors[name] = _changed(draw, good[name])
        if draw(st.integers(0, 9)) == 0:
            tensors["unheard of" if draw(st.booleans()) else "values"] = tensors.pop(name)
    data = to_bytes({name: value.clone() for name, value in tensors.items()})  # as they may share memory
    return entry, draw(damaged(data)) if draw(st.integers(0, 4)) == 0 else data


def _changed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with another value, size, type or shape."""
    how = draw(st.sampled_from(["value", "value", "value", "all", "shorter", "longer", "type", "shape"]))
    if how in ("value", "all"):
        kind = torch.finfo if tensor.is_floating_point() else torch.iinfo
        values = [-1, 0, 1, 2, 10**6, kind(tensor.dtype).min, kind(tensor.dtype).max]
        values += [math.nan, math.inf] if tensor.is_floating_point() else []
        chosen = draw(st.sampled_from(values))
        place = slice(None) if how == "all" or not len(tensor) else draw(st.integers(0, len(tensor) - 1))
        tensor = tensor.clone()
        tensor[place] = chosen
        return tensor
    other = draw(st.sampled_from([torch.float64, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn]))
    return {
        "shorter": lambda: tensor[: len(tensor) * draw(st.integers(0, 9)) // 10].clone(),
        "longer": lambda: torch.cat([tensor, tensor[-1:]]),
        "type": lambda: tensor.to(other),
        "shape": lambda: tensor.view(draw(st.sampled_from([(1, -1), (-1, 1)]))),
    }[how]()


def recommend(files: tuple[dict[str, Any], bytes]) -> None:
    """Load the model, whose digests were repaired, and ask it; scores that are no numbers are a defect."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(counting(), folder, dirs_exist_ok=True)
        (folder / COUNTS).write_bytes(files[1])
        write_json(
            folder / MODEL_CARD,
            {**read_json(folder / MODEL_CARD), "counts": {**files[0], "sha256": sha256(folder / COUNTS)}},
        )
        try:
            found = Recommender.load(folder)
        except ValueError as error:
            if str(folder) not in str(error):
                raise AssertionError("the message names no file") from error
            raise
        answer = found.recommend(["i1", "i2", "i1"], k=5)
        found.explain(Request(history=["i1", "i2"]), answer.items[0])
        found.term.padded(torch.arange(len(found.term.log_popularity)))
        assert all(map(math.isfinite, answer.scores)), answer.scores


@cache
def address() -> str:
    """Return where a service of a small model listens, until the process ends."""
    folder = Path(tempfile.mkdtemp())
    recommender = Recommender.load(save("sasrec", prepared(), folder / "model"))
    context = running(http.app(lambda: recommender, lambda: "1"))
    KEPT.append(context)
    return context.__enter__()


KEPT: list[Any] = []
IDS = st.sampled_from(["i1", "i2", "unheard of", ""]) | st.text(max_size=5)
BODIES = st.fixed_dictionaries(
    {"history": st.lists(IDS, max_size=4)},
    optional={
        "k": st.sampled_from([1, 0, -1, 10**30, 2.5, "3", None]),
        "exclude": st.lists(IDS, max_size=3) | st.none(),
        "user": IDS | st.none() | st.integers(),
        "times": st.lists(st.floats() | st.none(), max_size=4),
        "items_text": st.sampled_from([{}, None, {"new": {"title": "T"}}, {"": {}}, {"new": None}]),
        "unheard of": st.none(),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a path and the bytes of a body."""
    body = draw(BODIES | st.sampled_from(NASTY))
    if draw(st.booleans()):
        path, body = "/recommend/batch", {"requests": [body] * draw(st.integers(0, 3))}
    else:
        path = "/recommend"
    text = json.dumps(body, skipkeys=True).encode("utf-8", "surrogatepass")
    return path, draw(damaged(text)) if draw(st.integers(0, 3)) == 0 else text


def ask(request: tuple[str, bytes]) -> None:
    """Send the request; an answer that is not the service's own or the client's fault is a defect."""
    path, body = request
    answer = requests.post(address() + path, data=body, headers={"Content-Type": "application/json"}, timeout=8)
    assert answer.status_code < 500, f"{answer.status_code}: {answer.text:.200}"
    if answer.status_code >= 400:
        raise ValueError(answer.text)


MODELS = [
    Target("card", folders(), load),
    Target("counts", counts(), recommend),
    Target("requests", bodies(), ask),
]
