"""Architectures in pure torch: this package imports torch and itself."""

from models.base import Batch, Catalogue, SequenceModel
from models.flash4rec import FLASH4Rec
from models.sasrec import SASRec

REGISTRY: dict[str, type[SequenceModel]] = {"sasrec": SASRec, "flash4rec": FLASH4Rec}

__all__ = ["REGISTRY", "Batch", "Catalogue", "SequenceModel"]
