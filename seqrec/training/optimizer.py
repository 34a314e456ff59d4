"""Optimisers, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from seqrec.config import ConfigError, TrainConfig
from seqrec.models.base import SequenceModel
from seqrec.training.tensors import below


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Return the learning rate of `step` (0-based) of `total`: linear warm-up, then cosine decay."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    low = config.min_learning_rate
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


class Optimizers:
    """AdamW for the trainable parameters; with `sparse_tables`, a sparse Adam for the embedding tables.

    Raises:
        ConfigError: `sparse_tables` is set, but the model's item vectors are not computed from rows of a table.
    """

    def __init__(self, model: SequenceModel, config: TrainConfig) -> None:
        tables = _sparse_tables(model) if config.sparse_tables else []
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dense = {name: p for name, p in trainable.items() if not any(p is table for table in tables)}
        spared = {n for n, p in dense.items() if p.ndim < 2 or n.endswith(model.undecayed)}  # biases, gains
        groups = [
            {"params": [p for n, p in dense.items() if n not in spared], "weight_decay": config.weight_decay},
            {"params": [p for n, p in dense.items() if n in spared], "weight_decay": 0.0},
        ]
        self.parts: list[Optimizer] = [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)]
        if tables:
            self.parts.append(torch.optim.SparseAdam(tables, lr=config.learning_rate))

    @property
    def rate(self) -> float:
        """The learning rate of every parameter group."""
        return self.parts[0].param_groups[0]["lr"]

    @rate.setter
    def rate(self, rate: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate

    def step(self) -> None:
        """Update the parameters."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parameters, named `<number of the optimiser>.<number of the parameter>.<name>`."""
        return {
            f"{number}.{index}.{name}": torch.as_tensor(value)
            for number, part in enumerate(self.parts)
            for index, values in part.state_dict()["state"].items()
            for name, value in values.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for number, part in enumerate(self.parts):
            saved = part.state_dict()
            for name, value in below(f"{number}.", state_dict).items():
                index, key = name.split(".", 1)
                is_count = key == "step" and isinstance(part, torch.optim.SparseAdam)  # a Python number there
                saved["state"].setdefault(int(index), {})[key] = value.item() if is_count else value
            part.load_state_dict(saved)


def _sparse_tables(model: SequenceModel) -> list[Tensor]:
    """Return the trainable tables of items and users, whose gradients become sparse."""
    rows = min(model.catalogue.num_items, model.catalogue.num_users)
    large = [part for part in model.modules() if isinstance(part, nn.Embedding) and part.num_embeddings > rows]
    tables: list[Tensor] = [part.weight for part in large if part.weight.requires_grad]
    for part in model.parts:
        if not (part.reads_rows() or any(part.item_vectors() is table for table in tables)):
            raise ConfigError(
                f"sparse_tables: {type(part).__name__} has no plain table of items; set sparse_tables to false"
            )
    for table in large:
        table.sparse = True
    return tables


def clip_gradients(model: SequenceModel, limit: float) -> Tensor:
    """Clip the joint norm of the gradients to `limit`; those of `clipped_apart` are clipped separately.

    Each member of an ensemble is clipped as if it were alone; its loss, and with it its gradient, is divided by their
    number.

    Returns:
        The sum of all norms before clipping: a scalar, not finite if a gradient is not.
    """
    norms = []
    for part in model.parts:
        for chosen in (False, True):
            named = [p for name, p in part.named_parameters() if name.endswith(part.clipped_apart) is chosen]
            if parameters := [p for p in named if p.grad is not None]:  # the norm of none would lie on the CPU
                norms.append(_clip(parameters, limit / len(model.parts)))
    return torch.stack(norms).sum()


def _clip(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return nn.utils.clip_grad_norm_(parameters, limit)
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm: Tensor = torch.stack([value.norm() for value in values]).norm()
    for value in values:
        value.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
