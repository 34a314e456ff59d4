"""The engine of an ONNX graph, which answers nearly all requests without torch.

The folder of the graph also holds the weights. They are loaded when a request asks for what the graph cannot do: scores
of all items, item vectors, explanations, items it never saw, or a longer list. That takes seconds, once.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from seqrec.artifacts import GRAPH, GRAPH_CARD, read_json, sha256
from seqrec.serving.recommender import Best, Histories, Reads, Recommender
from seqrec.serving.rules import Items
from seqrec.training.saved import read

if TYPE_CHECKING:
    from seqrec.serving.torch_engine import TorchEngine


class OnnxEngine:
    """A graph that `seqrec export` wrote; see `Engine` of recommender.py."""

    def __init__(self, folder: Path, card: Mapping[str, Any], threads: int = 1, keep: Any = None) -> None:
        """Load the graph that `card` describes; `keep` is what keeps the folder, if it is temporary."""
        self.folder, self.card, self.threads, self._keep = folder, card, threads, keep
        self.reads = Reads(**card["reads"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(folder / GRAPH, options)

    @cached_property
    def weights(self) -> TorchEngine:
        """See `Engine.weights`."""
        import torch

        from seqrec.serving.torch_engine import TorchEngine
        from seqrec.training.checkpoint import load_checkpoint

        torch.set_num_threads(self.threads)
        try:
            checkpoint = load_checkpoint(self.folder)
            check_identity(self.folder, self.card, checkpoint.card)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"{error}; then start the service again") from error
        gc.freeze()  # see Service.switch
        return TorchEngine(checkpoint.model, checkpoint.count_term)

    def best(self, past: Histories, hidden: Sequence[Items], wanted: Sequence[int]) -> list[Best]:
        """See `Engine.best`."""
        k, seen = max(wanted), self.card["seen"]
        if k > self.card["k"]:
            return self.weights.best(past, hidden, wanted)
        missing = max(0, self.card["shortest"] - past.items.shape[1])
        items, times = (_padded(x[:, -seen:], missing) for x in (past.items, past.times))
        earlier = _padded(past.items[:, :-seen], 1)
        filled = np.zeros((len(hidden), max(map(len, hidden))), np.int64)
        for row, own in zip(filled, hidden, strict=True):
            row[: len(own)] = own
        inputs = {"items": items, "times": times, "user": past.user, "hidden": filled, "earlier": earlier}
        score_BK, item_BK = self.session.run(None, {name: inputs[name] for name in self.card["inputs"]})
        rows = zip(score_BK[:, :k].tolist(), item_BK[:, :k].tolist(), wanted, strict=True)
        return [(scores[:own], items[:own]) for scores, items, own in rows]


def _padded(x_BL: NDArray[Any], number: int) -> NDArray[Any]:
    """Return rows with a number of zeros before them; faster than numpy's pad."""
    return np.concatenate([np.zeros((len(x_BL), number), x_BL.dtype), x_BL], 1)


def load(folder: Path, threads: int = 1, keep: Any = None) -> Recommender:
    """Return the recommender of the graph in `folder`; see `OnnxEngine` for the arguments.

    Raises:
        ValueError: the graph was made of other weights.
    """
    saved, card = read(folder), read_json(folder / GRAPH_CARD)
    check_identity(folder, card, saved.card)
    return Recommender.of(saved, OnnxEngine(folder, card, threads, keep))


def check_identity(folder: Path, card: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if the graph in `folder` is not that of its card, or was made of other weights than `saved`."""
    wanted = identity(saved) | {"graph_sha256": sha256(folder / GRAPH)}
    if any(card.get(name) != value for name, value in wanted.items()):
        raise ValueError(f"{folder / GRAPH} was not exported from the weights beside it: export it again")


def identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hashes of what a graph is made of, from the card of the model."""
    counts_sha256 = saved["counts"].get("sha256")
    return {"weights_sha256": saved["weights_sha256"], "counts_sha256": counts_sha256, "files": saved["files"]}
