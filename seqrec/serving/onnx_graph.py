"""A model as an ONNX graph, from a history to the best items; onnx_engine.py runs it.

Inputs: `items` (B, L) int64, left-padded with 0; `times` (B, L) float64 and `user` (B,) int64 where the model needs
them; `hidden` (B, H) int64, items not to show, filled up with 0; `earlier` (B, E) int64, the events before `items`,
where the count term reads more of them than the model. Outputs: `scores` (B, K), `best` (B, K) int64.
"""

from __future__ import annotations

import logging
import random
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqrec.artifacts import GRAPH, GRAPH_CARD, sha256, write_json
from seqrec.config import RegisterConfig
from seqrec.config.ranges import ListLength
from seqrec.counts.term import CountTerm
from seqrec.models.base import Batch, SequenceModel
from seqrec.serving.onnx_engine import OnnxEngine, identity
from seqrec.serving.recommender import Recommender, Request, located
from seqrec.serving.torch_engine import TorchEngine
from seqrec.training.checkpoint import Checkpoint, load_checkpoint, write_files

TOLERANCE = 1e-3  # of a score, relative and absolute
CHECKED = 64  # histories that weights and graph must answer alike
YEAR = 365 * 86_400.0  # of their times
logger = logging.getLogger(__name__)


class _Top(nn.Module):
    """What the graph computes."""

    def __init__(self, model: SequenceModel, k: int, term: CountTerm | None) -> None:
        super().__init__()
        self.model, self.k = model, k
        self.counts = None if term is None else _Counts(term)
        self.items: Tensor
        self.register_buffer("items", model.item_vectors().detach().float()[: model.catalogue.num_items + 1])

    def forward(
        self, items: Tensor, times: Tensor | None, user: Tensor | None, hidden: Tensor, earlier: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and items, best first."""
        batch = Batch(
            items,
            torch.zeros_like(items, dtype=torch.float64) if times is None else times,
            torch.zeros_like(items[:, 0]) if user is None else user,
        )
        score_BV = self.model(self.model.asked(batch), last=True)[:, 0] @ self.items.T
        if self.counts is not None:
            score_BV = self.counts(score_BV, items if earlier is None else torch.cat([earlier, items], 1))
        score_BV = score_BV.scatter(1, torch.nn.functional.pad(hidden, (1, 0)), float("-inf"))  # 0 is padding
        return score_BV.topk(self.k)


class _Counts(nn.Module):
    """The count term, its rows filled up to the longest one: a graph gathers rows of one length alone."""

    def __init__(self, term: CountTerm) -> None:
        super().__init__()
        self.targets: Tensor
        self.values: Tensor
        self.weights: Tensor
        self.popularity: Tensor
        targets, values = term.padded(torch.arange(len(term.log_popularity)))
        self.register_buffer("targets", targets)  # (V, K)
        self.register_buffer("values", values)
        self.register_buffer("weights", term.weights.flip(0))  # the newest event last, as in `items`
        self.register_buffer("popularity", term.popularity * term.log_popularity)
        self.alpha, self.normalised = term.alpha, term.normalised
        self.further = nn.ModuleList(_Counts(further) for further in term.further.values())

    def forward(self, score_BV: Tensor, items_BL: Tensor) -> Tensor:
        """Return the scores with the term added."""
        events = len(self.weights)
        items_BJ = torch.nn.functional.pad(items_BL, (events, 0))[:, -events:]
        weight_BJ = self.weights * (items_BJ > 0)
        if self.normalised:
            weight_BJ = weight_BJ / weight_BJ.sum(1, keepdim=True).clamp(min=1e-9)
        row_N, event_N = (items_BJ > 0).nonzero(as_tuple=True)  # padding has no votes
        item_N, weight_N = items_BJ[row_N, event_N], self.alpha * weight_BJ[row_N, event_N]
        votes_NK = weight_N.unsqueeze(1) * self.values[item_N]
        cells_NK = self.targets[item_N] + score_BV.shape[1] * row_N.unsqueeze(1)
        score_BV = score_BV.flatten().scatter_add(0, cells_NK.flatten(), votes_NK.flatten()).view(score_BV.shape)
        score_BV = score_BV + self.popularity
        for further in self.further:
            score_BV = further(score_BV, items_BL)
        return score_BV


def export(
    *, saved: str | Path, output: Path, k: ListLength = 100, config: RegisterConfig | None = None
) -> dict[str, float]:
    """Write the model in `saved` as an ONNX graph, with a card, the vocabulary and the users beside it.

    Args:
        saved: folder with weights and card, or models:/NAME@champion.
        output: folder that receives model.onnx, model.onnx.json, and the files that belong to the model; if it is the
            folder `saved`, `serve --saved` runs the graph.
        k: number of items that the graph returns, at most the size of the catalogue.
        config: section `register`.

    Returns:
        How many items it returns.

    Raises:
        ValueError: the graph gives other scores than the weights, or does not run.
    """
    with located(saved, config) as folder:
        figures = export_checkpoint(load_checkpoint(folder), output, k)
    logger.info("%s: a graph with the scores of the weights; it returns %d items", output / GRAPH, figures["k"])
    return figures


def export_checkpoint(checkpoint: Checkpoint, output: Path, k: int = 100) -> dict[str, float]:
    """Write a checkpoint as an ONNX graph; see `export`."""
    engine = TorchEngine(checkpoint.model, checkpoint.count_term)
    model = engine.model
    k = min(k, model.catalogue.num_items)
    program, given = graph(model, k, engine.term)
    output.mkdir(parents=True, exist_ok=True)
    program.save(output / GRAPH)
    card = {"k": k, "inputs": given, "shortest": model.shortest, "seen": model.options.history}
    card |= {name: checkpoint.card[name] for name in ("filter_seen", "median_gap")}
    card |= {"reads": asdict(engine.reads), **identity(checkpoint.card)}
    try:
        weights, run = (Recommender.of(checkpoint, each) for each in (engine, OnnxEngine(output, card)))
        _check_equal(weights, run, k)
    except ValueError:
        raise
    except Exception as error:  # of ONNX Runtime, which names no common class
        raise ValueError(f"the graph does not run, set register.graph to false to do without: {error}") from error
    write_files(output, checkpoint.files)
    write_json(output / GRAPH_CARD, card | {"graph_sha256": sha256(output / GRAPH)})
    return {"k": k}


def _check_equal(weights: Recommender, graph: Recommender, k: int) -> None:
    """Raise ValueError if the two score the best items of random users, histories and times differently."""
    chance, longest, users = random.Random(0), weights.events, [None, *weights.users]
    for number in range(CHECKED):
        length = 1 + number * (longest - 1) // (CHECKED - 1)
        request = Request(
            history=chance.choices(weights.item_ids, k=length),
            times=sorted(chance.uniform(0, YEAR) for _ in range(length)),
            at=YEAR + chance.uniform(0, YEAR),
            user=chance.choice(users),
            k=k,
        )
        theirs, ours = (np.array(each.answer([request])[0].scores) for each in (weights, graph))
        if not np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            apart = np.abs(ours - theirs).max()
            raise ValueError(
                f"the scores of the graph and of the weights differ by {apart:.2g} for a history of {length} items"
            )


def graph(model: SequenceModel, k: int, term: CountTerm | None) -> tuple[torch.onnx.ONNXProgram, list[str]]:
    """Return the graph from a history to the best `k` items, and the names of its inputs."""
    from torch._dynamo import config as dynamo_config  # takes half a second to import

    rows, length = 2, max(model.shortest, min(4, model.options.history))
    example = {
        "items": torch.ones(rows, length, dtype=torch.int64),
        "times": torch.arange(1 - length, 1).double().repeat(rows, 1) if "times" in model.needs else None,
        "user": torch.ones(rows, dtype=torch.int64) if "user" in model.needs else None,
        "hidden": torch.ones(rows, 3, dtype=torch.int64),
        "earlier": torch.ones(rows, 3, dtype=torch.int64) if term and term.events > model.options.history else None,
    }
    given = [name for name, value in example.items() if value is not None]
    batch, shortest, longest = torch.export.Dim("batch"), model.shortest, model.options.length
    width = torch.export.Dim("length", min=shortest, max=longest) if shortest < longest else None
    shapes: dict[str, Any] = {
        "items": {0: batch, 1: width},
        "times": {0: batch, 1: width},
        "user": {0: batch},
        "hidden": {0: batch, 1: torch.export.Dim("hidden")},
        "earlier": {0: batch, 1: torch.export.Dim("earlier")},
    }
    uncached = dynamo_config.patch(fake_tensor_cache_enabled=False)  # with symbolic sizes, it costs more than it saves
    with warnings.catch_warnings(), uncached:
        warnings.simplefilter("ignore")  # about the converter's own internals
        for name in ("torch.onnx", "onnxscript"):
            logging.getLogger(name).setLevel(logging.ERROR)
        program = torch.onnx.export(
            _Top(model, k, term).eval(),
            kwargs=example,
            dynamo=True,
            verbose=False,
            input_names=given,
            output_names=["scores", "best"],
            dynamic_shapes={name: shapes[name] if name in given else None for name in example},
        )
    assert program is not None
    return program, given
