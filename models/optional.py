"""What a model may offer beyond `SequenceModel`: base classes, one for each part of the pipeline that asks for it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeGuard

from torch import Tensor

from seqrec.models.base import Batch, Catalogue, SequenceModel


class DescribedItems(SequenceModel):
    """Reads a description of the items, which training/families.py makes from their table into `Catalogue.tokens`."""

    described_by: ClassVar[Literal["text", "attributes"]] = "text"

    @classmethod
    def needs_of(cls, options: Any) -> frozenset[str]:
        return frozenset({cls.described_by})

    def tokens(self) -> dict[str, Tensor]:
        """Return the description of the items; raise ValueError if the dataset has none."""
        if self.catalogue.tokens is None:
            raise ValueError(f"{type(self).__name__} reads the items' {self.described_by}, but the dataset has none")
        return self.catalogue.tokens


class ReadsVectors(DescribedItems):
    """Reads `vectors` (V, X): each item's text, encoded by a frozen BERT that the option `start` names."""


class ReadsAttributes(DescribedItems):
    """Reads `values` (V, M): numbers of the words that an item shares with others; 0 is padding."""

    described_by = "attributes"


class SelfSupervised(SequenceModel):
    """Has a phase of pre-training in which the last event of each row is its target."""

    pretraining: ClassVar[str]  # name of the phase
    by_prefix: ClassVar[bool] = True  # whether every prefix of a history is a row in this phase, for any objective

    @classmethod
    def pretrains(cls, options: Any) -> bool:
        """Return whether a model with `options` has a pre-training."""
        return True

    def phases(self, stage: str) -> tuple[str, ...]:
        return (self.pretraining,) if stage == "pretrain" else ("train",)

    def pair_scores(self, batch: Batch) -> Tensor:
        """Return (B, B): the score of each row's history with the target of each row."""
        raise NotImplementedError

    def hits(self, batch: Batch) -> Tensor:
        """Return bool (B,): whether each row's target scores highest among the targets of all rows."""
        target_B = batch.items[:, -1]
        score_BB = self.pair_scores(batch)
        other_BB = target_B.unsqueeze(1) != target_B
        return ((score_BB >= score_BB.diagonal().unsqueeze(1)) & other_BB).sum(1) == 0


def self_supervised(model: SequenceModel, phase: str) -> TypeGuard[SelfSupervised]:
    """Return whether `phase` is the one of a `SelfSupervised` model in which rows end with their target."""
    return isinstance(model, SelfSupervised) and phase == model.pretraining


class Transferable(SelfSupervised, DescribedItems):
    """Pre-trains on the datasets in `sources` instead of its own, which it can serve without further training."""

    def serve(self, catalogue: Catalogue) -> None:
        """Replace the catalogue of pre-training by that of the dataset."""
        raise NotImplementedError


class ReadsTokens(Transferable):
    """Reads each item's text as tokens: `ids`, `types`, `starts`, `offsets` and `special`; see data/item_tokens.py."""

    def grown(self, catalogue: Catalogue) -> ReadsTokens:
        """Return this model for a catalogue with more items, which were not known in training."""
        raise NotImplementedError


class TwoDomains(SelfSupervised):
    """Pre-trains on its dataset together with those in `sources`, which form a second domain."""

    by_prefix = False

    def add_domain(self, num_items: int) -> None:
        """Add the second domain, whose items follow those of the catalogue."""
        raise NotImplementedError

    def drop_domain(self) -> None:
        """Remove the second domain, if there is one."""
        raise NotImplementedError
