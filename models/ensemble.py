"""Several networks of one architecture, trained side by side on the same steps, that rank together.

Their mean score is one inner product: that of their joined queries, divided by their number, and their joined item
vectors. Up to a constant of each query, it is the mean of their log-probabilities. An ensemble is therefore ranked,
exported and served like one wide network (deep ensembles: Lakshminarayanan et al., NeurIPS 2017, arXiv:1612.01474).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqrec.models.base import Batch, Catalogue, SequenceModel, TaskLoss, require
from seqrec.models.optional import DescribedItems, SelfSupervised


class Ensemble(SequenceModel):
    """The networks `members`; they differ by their initial values and by their dropout."""

    def __init__(self, architecture: type[SequenceModel], options: Any, catalogue: Catalogue) -> None:
        name = architecture.__name__
        alone = issubclass(architecture, SelfSupervised | DescribedItems)
        require(not alone, f"members: must be 1, because {name} cannot have several")
        self.objectives = architecture.objectives_of(options)  # type: ignore[misc]
        super().__init__(options, catalogue)
        self.members = nn.ModuleList(architecture(options, catalogue) for _ in range(options.members))
        first = self.parts[0]
        require(not first.biased, f"members: {name} has a bias for each item, which several members cannot share")
        self.undecayed, self.shortest = first.undecayed, first.shortest  # type: ignore[misc]

    @property
    def parts(self) -> list[SequenceModel]:
        return [*self.members]

    @property
    def architecture(self) -> type[SequenceModel]:
        return type(self.parts[0])

    @property
    def needs(self) -> frozenset[str]:
        return self.parts[0].needs

    def forward(self, batch: Batch, last: bool = False) -> Tensor:
        return torch.cat([part(batch, last) for part in self.parts], -1) / len(self.members)

    def item_vectors(self) -> Tensor:
        return torch.cat([part.item_vectors() for part in self.parts], 1)

    def phases(self, stage: str) -> tuple[str, ...]:
        return self.parts[0].phases(stage)

    def enter(self, phase: str) -> None:
        for part in self.parts:
            part.enter(phase)

    def on_epoch(self) -> None:
        for part in self.parts:
            part.on_epoch()

    def training_loss(self, batch: Batch, task: TaskLoss) -> dict[str, Tensor]:
        """Return the mean of each term over the members, each of which is trained as if it were alone."""
        terms = [part.training_loss(batch, partial(task, of=part)) for part in self.parts]
        return {name: torch.stack([term[name] for term in terms]).mean(0) for name in terms[0]}


def create(architecture: type[SequenceModel], options: Any, catalogue: Catalogue) -> SequenceModel:
    """Return a new network, or with the option `members` an ensemble of that many.

    Raises:
        ValueError: an option has a value that the architecture cannot take.
    """
    if options.members > 1:
        return Ensemble(architecture, options, catalogue)
    return architecture(options, catalogue)
