"""The protocol that every model follows, and that training, ranking and export rely on.

Shape suffixes, in every file of this package:
  B batch   L sequence length   P positions with a target   D model width   V items + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.nn import functional as F

from models import attention_weights

PAD = 0
Objective = Literal["causal", "last", "cloze"]  # see seqrec/training/objectives.py
OBJECTIVES: tuple[str, ...] = get_args(Objective)


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
    tokens: dict[str, Tensor] | None = None  # flat ids, types, offsets; vectors; values (models that read text only)


TaskLoss = Callable[[Tensor], Tensor]  # queries (B, P, D) -> (B, P); their sum is the mean loss per target


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every model; the model's own file adds to them."""

    length: int = 50  # positions the model sees: the most recent events, and MASK where it is asked with one
    objective: Objective = "causal"

    def __post_init__(self) -> None:
        check(self.length >= 1, "length must be at least 1")
        for name, allowed in _choices(type(self)).items():
            check(getattr(self, name) in allowed, f"{name} must be one of {', '.join(allowed)}")

    @property
    def masked(self) -> bool:
        """Whether targets are MASKs inside the window, seen from both sides; otherwise a target follows its query."""
        return self.objective == "cloze"

    @property
    def history(self) -> int:
        """Most recent events that a query for the next item sees: one fewer where MASK takes a place."""
        return self.length - self.masked

    def check_unused(self, why: str, *names: str) -> None:
        """Raise ValueError if an option of `names` is not at its default."""
        changed = [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
        check(not changed, f"{', '.join(changed)}: no effect, as {why}")


def _choices(options: type[Options]) -> dict[str, tuple[str, ...]]:
    """Return the values that each option of a Literal type may have."""
    hints = get_type_hints(options)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def with_mask(batch: Batch, mask: int) -> Batch:
    """Append MASK, the place of the event to predict, at the time of the last event."""
    items = F.pad(batch.items, (0, 1), value=mask)
    return batch._replace(items=items, times=F.pad(batch.times, (0, 1)))


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
    # of the items: what it reads in `Catalogue.tokens`
    text: ClassVar[Literal["", "tokens", "vectors", "attributes"]] = ""
    reads_events: ClassVar[bool] = False  # whether its last attention has one key an event, in order
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

    @classmethod
    def needs_of(cls, options: Any) -> frozenset[str]:
        """Return what a model with `options` reads besides items, of times, user, text and attributes."""
        return frozenset({"attributes" if cls.text == "attributes" else "text"} if cls.text else ())

    @property
    def needs(self) -> frozenset[str]:
        """What this model reads besides items, of times, user, text and attributes."""
        return self.needs_of(self.options)

    def asked(self, batch: Batch) -> Batch:
        """Return the batch that asks what follows each history: with MASK at its end for a model trained with them."""
        return with_mask(batch, self.catalogue.num_items + 1) if self.options.masked else batch

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return queries (B, L, D); with `last`, (B, 1, D), on the very path that is served."""
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        """Return (V, D); row 0 is padding and never a candidate."""
        raise NotImplementedError

    def attention_maps(self, batch: Batch, last: bool = False) -> Tensor | None:
        """Return the weights (B, H, Q, L) of its last attention, in eval mode; None if its keys are not the events."""
        if not self.reads_events:
            return None
        with attention_weights.kept() as weights:
            self(batch, last)
        return weights[0].reshape(len(batch.items), -1, *weights[0].shape[-2:])

    def masked_maps(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return `attention_maps` without and with learnt masks of the last layer; None for a model without such."""
        return None

    def serving_variants(self) -> dict[float, Any]:
        """Return the options that the weights can be served with as they are, by the share of rows not computed."""
        return {}

    def serve(self, catalogue: Catalogue) -> None:
        """Take another catalogue in place of the one it was trained on; models of tokens alone can."""
        raise NotImplementedError

    def grown(self, catalogue: Catalogue) -> SequenceModel:
        """Return this model with more items, known from their text; models of tokens alone can."""
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
