"""Architectures in pure torch: this package imports torch and itself."""

from __future__ import annotations

import pkgutil
import sys
from collections import UserDict
from typing import Any

from seqrec.models.base import Batch, Catalogue, Options, SequenceModel


class Registry(UserDict[str, type[SequenceModel]]):
    """The architectures by name. The module of an architecture is imported when its class is first read.

    `register` adds a subclass of `SequenceModel` from any module.
    """

    data: dict[str, Any]  # each architecture as `module:Class` until it is read, then its class

    def __getitem__(self, name: str) -> type[SequenceModel]:
        entry = self.data[name]
        if isinstance(entry, str):
            entry = self.data[name] = pkgutil.resolve_name(entry)
        return entry

    def place(self, name: str) -> str:
        """Return module and class of an architecture as `module:Class`, without importing the module."""
        entry = self.data[name]
        return entry if isinstance(entry, str) else _place(entry)

    def module(self, name: str) -> str:
        """Return the module of an architecture, without importing it."""
        return self.place(name).partition(":")[0]


def _place(architecture: type[SequenceModel]) -> str:
    return f"{architecture.__module__}:{architecture.__name__}"


CLASSES = {  # by module of this package, which is also the name of the architecture
    "sasrec": "SASRec",
    "esasrec": "ESASRec",
    "flash4rec": "FLASH4Rec",
    "hstu": "HSTU",
    "bsarec": "BSARec",
    "lrurec": "LRURec",
    "strec": "STRec",
    "gru4rec": "GRU4Rec",
    "bert4rec": "BERT4Rec",
    "caser": "Caser",
    "fpmc": "FPMC",
    "mfbpr": "MFBPR",
    "tisasrec": "TiSASRec",
    "ssept": "SSEPT",
    "rec_denoiser": "RecDenoiser",
    "recformer": "Recformer",
    "zesrec": "ZESRec",
    "unisrec": "UniSRec",
    "fdsa": "FDSA",
    "s3rec": "S3Rec",
    "recguru": "RecGURU",
}
VARIANTS = {  # a class that an option of another class chooses, and the latter
    f"{__name__}.recformer:{variant}": f"{__name__}.recformer:Recformer"
    for variant in ("RecformerText", "RecformerItems")
}
REGISTRY = Registry()
REGISTRY.data = {name: f"{__name__}.{name}:{cls}" for name, cls in CLASSES.items()}
UNTRAINED = Registry()  # networks of the baselines: no setting names them, and nothing trains them
UNTRAINED.data = {"constant": f"{__name__}.baselines:Constant"}


def register(name: str, architecture: type[SequenceModel]) -> None:
    """Give an architecture of your own a name, under which settings, `seqrec.fit` and `seqrec.load` know it.

    Raises:
        ValueError: the name belongs to another architecture, or the class is no `SequenceModel` from a file.
    """
    if not (isinstance(architecture, type) and issubclass(architecture, SequenceModel)):
        raise ValueError(f"{architecture!r:.80} is not a subclass of seqrec.models.SequenceModel")
    if not getattr(sys.modules.get(architecture.__module__), "__file__", None):
        raise ValueError(
            f"{architecture.__name__} is not defined in a file: move it to a file such as mine.py and import it from "
            "there, because a training is identified by the code of its model"
        )
    if name in REGISTRY and REGISTRY.place(name) != _place(architecture):
        raise ValueError(f"the name {name!r} is taken by {REGISTRY.place(name)}: choose another one")
    REGISTRY[name] = architecture


def architecture_of(name: str) -> type[SequenceModel]:
    """Return an architecture of `REGISTRY` or `UNTRAINED`; raise KeyError if there is none of this name."""
    return (UNTRAINED if name in UNTRAINED else REGISTRY)[name]


def name_of(architecture: type[SequenceModel]) -> str:
    """Return the name of an architecture of `REGISTRY` or `UNTRAINED`; raise ValueError if it has none."""
    place = VARIANTS.get(_place(architecture), _place(architecture))
    for registry in (UNTRAINED, REGISTRY):
        for name in registry:
            if registry.place(name) == place:
                return name
    raise ValueError(f"{_place(architecture)} is not registered: call seqrec.models.register(NAME, CLASS)")


__all__ = ["REGISTRY", "Batch", "Catalogue", "Options", "SequenceModel", "register"]
