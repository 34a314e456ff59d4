"""The card and weights of a saved model, and the requests of the service."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import requests
from hypothesis import strategies as st
from support import prepare_rows, running, save, synthetic_rows

from fuzz.files import damaged
from fuzz.harness import Target
from fuzz.setting_targets import NASTY, paths
from seqrec.artifacts import MODEL_CARD, WEIGHTS
from seqrec.serving import http
from seqrec.serving.recommender import Recommender
from seqrec.training.checkpoint import load_checkpoint


@cache
def saved() -> Path:
    """Return the folder of a small model."""
    return save("sasrec", prepared(), Path(tempfile.mkdtemp()))


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
            inner[key] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    if draw(st.integers(0, 4)) == 0:
        weights = draw(damaged(weights))
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
        load_checkpoint(Path(folder))


@cache
def prepared() -> Path:
    """Return the folder of a small prepared dataset."""
    return prepare_rows(Path(tempfile.mkdtemp()), synthetic_rows())


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
    Target("requests", bodies(), ask),
]
