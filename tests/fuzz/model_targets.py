"""The card and weights of a saved model. (Requests of the service: tests/serving/test_openapi.py.)"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from support import prepare_rows, save, synthetic_rows

from fuzz.files import damaged
from fuzz.harness import Target
from fuzz.setting_targets import NASTY, paths
from seqrec.artifacts import MODEL_CARD, WEIGHTS
from seqrec.training.checkpoint import load_checkpoint


@cache
def saved() -> Path:
    """Return the folder of a small model."""
    return save("sasrec", prepare_rows(Path(tempfile.mkdtemp()), synthetic_rows()), Path(tempfile.mkdtemp()))


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


MODELS = [Target("card", folders(), load)]
