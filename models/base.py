"""The protocol that every model follows, and that training, ranking and export rely on.

Shape suffixes, in every file of this package:
  B batch   L sequence length   P positions with a target   D model width   V items + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

PAD = 0
OBJECTIVES = ("causal", "last", "cloze")


class Batch(NamedTuple):
    """What a model sees of a user: plain tensors, so that torch.export takes it as it is."""

    items: Tensor  # (B, L) int64, left-padded; 0 = PAD, num_items + 1 = MASK
    times: Tensor  # (B, L) float64, seconds relative to the last event (<= 0): float32 loses seconds after half a year
    user: Tensor  # (B,) int64, 0 = unknown: training had no target of that user


class Catalogue(NamedTuple):
    """All that a model may know of a dataset; saved with its weights."""

    num_items: int
    num_users: int
    length: int
    tokens: dict[str, Tensor] | None = None  # flat ids, types, offsets (text models only)


TaskLoss = Callable[[Tensor], Tensor]  # queries (B, P, D) -> (B, P); their sum is the mean loss per target


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every model; the model's own file adds to them."""

    length: int = 50  # most recent events the model sees
    objective: str = "causal"

    def __post_init__(self) -> None:
        check(self.length >= 1, "length must be at least 1")
        check(self.objective in OBJECTIVES, f"objective must be one of {', '.join(OBJECTIVES)}")

    def check_unused(self, why: str, *names: str) -> None:
        """Raise ValueError if an option of `names` is not at its default."""
        changed = [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
        check(not changed, f"{', '.join(changed)}: no effect, as {why}")


def check(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


class SequenceModel(nn.Module):
    """A map from a user's past to a query vector in the space of the items.

    A score is always the inner product of a query and an item vector (a bias is one more column): one loss,
    one ranking path and one export path serve every model.
    """

    Options: ClassVar[type[Options]]
    options: Any
    objectives: ClassVar[frozenset[str]] = frozenset({"causal"})
    needs: ClassVar[frozenset[str]] = frozenset()  # subset of times, user, text
    clipped_apart: ClassVar[tuple[str, ...]] = ()  # ends of names of parameters whose gradients are clipped apart
    undecayed: ClassVar[tuple[str, ...]] = ()  # ends of names of matrices without weight decay; vectors never have any
    shortest = 1  # positions of a batch that an exported graph takes; shorter ones are padded
    contrastive: ClassVar[frozenset[str]] = frozenset()  # phases whose batches end with the target, selected by `hits`

    def __init__(self, options: Any, catalogue: Catalogue) -> None:
        super().__init__()
        name = type(self).__name__
        check(
            options.objective in self.objectives,
            f"objective: {name} is trained with {', '.join(sorted(self.objectives))}, not {options.objective}",
        )
        self.options = options
        self.catalogue = catalogue

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return queries (B, L, D); with `last`, (B, 1, D), on the very path that is served."""
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        """Return (V, D); row 0 is padding and never a candidate."""
        raise NotImplementedError

    def user_tables(self) -> list[nn.Embedding]:
        """Return the tables called `users`: row u is user u, and row 0 a user that training did not know."""
        named = ((name.rpartition(".")[2], part) for name, part in self.named_modules())
        return [part for name, part in named if name == "users" and isinstance(part, nn.Embedding)]

    def phases(self, stage: str) -> tuple[str, ...]:
        """Return the training phases of `stage`, pretrain or finetune; best weights are restored between phases."""
        return () if stage == "pretrain" else ("train",)

    def enter(self, phase: str) -> None:
        """Freeze or switch for `phase`; the engine then rebuilds the optimiser."""

    def on_epoch(self) -> None:
        """Work before each epoch, in eval mode and without gradient."""

    def hits(self, batch: Batch) -> Tensor:
        """Return bool (B,): which targets, the batch's last events, are told apart from those of the other rows."""
        raise NotImplementedError

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """Return the named terms whose sum is minimised; one named `figure/...` is logged with them, not minimised."""
        return {"task": task(self(batch)).sum()}
