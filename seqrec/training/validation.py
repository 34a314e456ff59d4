"""Validation and early stopping: on NDCG@10, or on in-batch accuracy in a contrastive phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from seqrec.config import TrainConfig
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.evaluation.metrics import SELECTION
from seqrec.models.base import SequenceModel
from seqrec.models.optional import SelfSupervised, self_supervised
from seqrec.training.batches import trained_users
from seqrec.training.tensors import below

ACCURACY = "valid/accuracy"  # in contrastive phases


class EarlyStopping:
    """Keeps the weights that were best in a phase; stops after `patience` validations without better ones."""

    def __init__(self, model: SequenceModel, phase: str, patience: int) -> None:
        self.model, self.patience = model, patience
        self.metric = ACCURACY if self_supervised(model, phase) else SELECTION
        self.best = -1.0  # best value of the metric; -1: none yet
        self.waited = 0  # validations since the best one
        self.weights: dict[str, Tensor] = {}  # best weights; empty before the first validation

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self.waited >= self.patience

    def update(self, values: Mapping[str, float]) -> None:
        """Take the results of a validation of the current weights."""
        self.waited += 1
        if values[self.metric] > self.best:
            self.best, self.waited = values[self.metric], 0
            self.weights = {name: weight.detach().clone() for name, weight in self.model.state_dict().items()}

    def restore_best(self) -> None:
        """Give the model its best weights; without a validation it keeps those it has."""
        self.model.load_state_dict(self.weights or self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the best weights, their value, and the validations since."""
        weights = {f"weights.{name}": value for name, value in self.weights.items()}
        return {"best": self.best, "waited": self.waited, **weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.best, self.waited = state_dict["best"], state_dict["waited"]
        self.weights = below("weights.", state_dict)


def of_phase(
    model: SequenceModel,
    data: Sequences,
    phase: str,
    config: TrainConfig,
    *,
    filter_seen: bool,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Return the metrics of `in_batch_accuracy` in a contrastive phase, of `validate` in others."""
    if self_supervised(model, phase):
        values = in_batch_accuracy(model, data, config.batch_size, accelerator)
    else:
        known_U = trained_users(data, config).to(data.start.device)
        values = validate(model, data, filter_seen=filter_seen, known_U=known_U, accelerator=accelerator)
    metrics.require_possible(values, type(model).__name__)
    return values


def validate(
    model: SequenceModel,
    data: Sequences,
    *,
    filter_seen: bool,
    known_U: Tensor | None = None,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Put the model into eval mode, and return its metrics on the validation cases.

    Several processes share the work and return the same values.

    `known_U` is passed on to `ranking.model_scorer`.
    """
    chosen = sequences.cases(data, "valid")
    if accelerator is not None:
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        chosen = Cases(user=chosen.user[mine], position=chosen.position[mine])
    scorer = ranking.model_scorer(model.eval(), known_U)
    ranked = ranking.rank(scorer, data, chosen, filter_seen=filter_seen, both=False, name=type(model).__name__)
    counts = metrics.histogram(ranked.rank, data.num_items)
    if accelerator is not None:
        counts = accelerator.reduce(counts)
    values = metrics.from_histogram(counts)
    return {f"valid/{name}": values[name] for name in ("ndcg@10", "recall@10", "mrr")}


@torch.no_grad()
def in_batch_accuracy(model: SelfSupervised, data: Sequences, rows: int, accelerator: Accelerator) -> dict[str, float]:
    """Return the share of validation cases whose target scores highest among the targets of its block of `rows`."""
    chosen = sequences.cases(data, "valid")
    known = chosen.position > data.start[chosen.user]
    chosen = Cases(user=chosen.user[known], position=chosen.position[known])
    model.eval()
    hits = torch.zeros(2, dtype=torch.int64, device=data.device)
    blocks = torch.arange(len(chosen), device=chosen.user.device).split(rows)
    for block in blocks[accelerator.process_index :: accelerator.num_processes]:
        user, position = chosen.user[block], chosen.position[block]
        batch = sequences.window(data, user, position + 1, model.options.length + 1)  # the target is its last event
        hits += torch.stack([model.hits(batch).sum(), torch.tensor(len(block), device=hits.device)])
    found, number = accelerator.reduce(hits).tolist()
    return {ACCURACY: found / max(1, number)}
