"""The interface of every model, on which training, ranking and export rely.

Shape suffixes, in every file of this package:
  B batch   L sequence length   P positions with a target   D model width   V items + 1
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.nn import functional as F

PAD = 0
Objective = Literal["causal", "last", "cloze"]  # see seqrec/training/objectives.py


class Batch(NamedTuple):
    """The input of a model: plain tensors, so that torch.export accepts it."""

    items: Tensor  # (B, L) int64, left-padded; 0 = PAD, num_items + 1 = MASK
    times: Tensor  # (B, L) float64, seconds relative to the last event or, if `Options.from_request`, to the request
    user: Tensor  # (B,) int64; 0 = unknown, a user without training targets


class Catalogue(NamedTuple):
    """What a model knows about its dataset; saved with the weights."""

    num_items: int
    num_users: int
    length: int
    tokens: dict[str, Tensor] | None = None  # description of the items, for the models of optional.py


class TaskLoss(Protocol):
    """The loss of the training task."""

    def __call__(self, query_BPD: Tensor, /, *, skip_last: bool = False, of: SequenceModel | None = None) -> Tensor:
        """Return the losses (B, P) of the queries of the last P positions; their sum is the mean loss per target.

        Args:
            query_BPD: the queries.
            skip_last: whether the queries belong to the P positions before the last one.
            of: the member of an ensemble that made the queries; default: the model.
        """


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all models share; each model adds its own.

    The widths and dropouts that a model adds under the usual names are checked here.
    """

    length: int = 50  # positions that the model reads: the most recent events, and MASK with objective cloze
    objective: Objective = "causal"
    members: int = 1  # networks that are trained side by side; the scores are their mean

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("length", "d_model"):
                self.at_least(1, name)
            if name.endswith("dropout"):
                require(0 <= value < 1, f"{name} must be at least 0 and under 1")
        self.at_least(1, "members")
        require(self.history >= 1, "length must be at least 2 with objective cloze: MASK takes one position")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                require(getattr(self, name) in get_args(hint), f"{name} must be one of {', '.join(get_args(hint))}")

    @property
    def masked(self) -> bool:
        """Whether targets are masked events within the window; otherwise, targets follow their query."""
        return self.objective == "cloze"

    @property
    def history(self) -> int:
        """Number of recent events that a query for the next item can see; MASK takes one position."""
        return self.length - self.masked

    @property
    def from_request(self) -> bool:
        """Whether times are relative to the request, which comes after the last event, instead of to that event."""
        return False

    def at_least(self, least: int, *names: str) -> None:
        """Raise ValueError if an option in `names` is smaller than `least`."""
        for name in names:
            require(getattr(self, name) >= least, f"{name} must be at least {least}")

    def check_unused(self, why: str, *names: str) -> None:
        """Raise ValueError if an option in `names` differs from its default."""
        changed = [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
        require(not changed, f"{', '.join(changed)}: no effect, as {why}")


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


class SequenceModel(nn.Module):
    """Maps a user's past to a query vector in the space of item vectors.

    Every score is the inner product of a query and an item vector, with a bias as one more column. All models therefore
    share the losses, the ranking and the export.
    """

    Options: ClassVar[type[Options]] = Options
    options: Any
    objectives: ClassVar[frozenset[str]] = frozenset({"causal"})
    always_reads: ClassVar[frozenset[str]] = frozenset()  # default of `needs_of`
    biased = False  # whether the last column of the item vectors is a bias, or a constant for the query's last column
    reads_events: ClassVar[bool] = False  # whether the keys of its last attention are the events, in order
    undecayed: ClassVar[tuple[str, ...]] = ()  # name suffixes of matrices without weight decay; vectors never have any
    clipped_apart: ClassVar[tuple[str, ...]] = ()  # name suffixes of parameters, clipped by a norm of their own
    other_views: ClassVar[frozenset[str]] = frozenset()  # phases whose training queries are not those of `forward`
    shortest = 1  # minimum number of positions in an exported graph; shorter inputs are padded

    def __init__(self, options: Any, catalogue: Catalogue) -> None:
        super().__init__()
        name = type(self).__name__
        require(
            options.objective in self.objectives,
            f"objective: {name} is trained with {', '.join(sorted(self.objectives))}, not {options.objective}",
        )
        self.options = options
        self.catalogue = catalogue

    @property
    def architecture(self) -> type[SequenceModel]:
        """The class of the model, or of the members of an ensemble."""
        return type(self)

    @property
    def parts(self) -> list[SequenceModel]:
        """The model, or the members of an ensemble."""
        return [self]

    @classmethod
    def objectives_of(cls, options: Any) -> frozenset[str]:
        """Return the objectives that a model with `options` can be trained with."""
        return cls.objectives

    @classmethod
    def needs_of(cls, options: Any) -> frozenset[str]:
        """Return which of times, user, text and attributes a model with `options` reads besides items."""
        return cls.always_reads

    @property
    def needs(self) -> frozenset[str]:
        """Which of times, user, text and attributes this model reads besides items."""
        return self.needs_of(self.options)

    def seen(self, batch: Batch) -> Batch:
        """Return the newest events of each history, as many as the model reads."""
        length = self.options.history
        return batch._replace(items=batch.items[:, -length:], times=batch.times[:, -length:])

    def asked(self, batch: Batch) -> Batch:
        """Return the batch that queries the next item of each history.

        With objective cloze, MASK is appended, with the time of the last event.
        """
        if not self.options.masked:
            return batch
        items = F.pad(batch.items, (0, 1), value=self.catalogue.num_items + 1)
        return batch._replace(items=items, times=F.pad(batch.times, (0, 1)))

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        """Return queries (B, L, D); with `last`, only the last ones (B, 1, D), computed as in serving."""
        raise NotImplementedError

    def item_vectors(self) -> Tensor:
        """Return item vectors (V, D), by default the table `items`; row 0 is padding, which is never a candidate."""
        return self.get_parameter("items.weight")

    @classmethod
    def reads_rows(cls) -> bool:
        """Return whether `vectors_of` reads only the rows of its items, from the table `items`."""
        return cls.item_vectors is SequenceModel.item_vectors

    def vectors_of(self, items: Tensor, *, sparse: bool = False) -> Tensor:
        """Return the vectors (..., D) of `items` (...); with `sparse`, the table's gradient has only their rows."""
        return F.embedding(items, self.item_vectors(), sparse=sparse)

    def on_start(self, count_V: Tensor) -> None:
        """Run before a training on data with `count_V` (V,) training events of each item, 0 for padding."""

    def phases(self, stage: str) -> tuple[str, ...]:
        """Return the phases of `stage`, pretrain or finetune; after each phase, its best weights are restored."""
        return () if stage == "pretrain" else ("train",)

    def enter(self, phase: str) -> None:
        """Freeze parameters or switch modes for `phase`; the optimiser is rebuilt afterwards."""

    def on_epoch(self) -> None:
        """Run before each epoch, in eval mode and without gradients."""

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """Return the named terms whose sum is minimised; those named `figure/...` are only logged."""
        return {"task": task(self(batch)).sum()}
