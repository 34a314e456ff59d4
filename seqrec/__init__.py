"""seqrec: sequential recommendation as a pipeline, from raw logs to a registered champion.

From Python: `Dataset`, `fit`, `Model` and `load`, which are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqrec import models
    from seqrec.library import Dataset, Evaluation, Model, fit, load

__version__ = "0.1.0"
__all__ = ["Dataset", "Evaluation", "Model", "fit", "load", "models"]


def __getattr__(name: str) -> Any:
    """Import what a program uses of the library; `import seqrec` alone imports neither torch nor polars."""
    if name == "models":
        return importlib.import_module("seqrec.models")
    if name in __all__:
        return getattr(importlib.import_module("seqrec.library"), name)
    raise AttributeError(f"module 'seqrec' has no attribute {name!r}")
