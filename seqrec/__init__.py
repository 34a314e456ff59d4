"""seqrec: sequential recommendation as a pipeline, from raw logs to a registered champion."""

from pathlib import Path

__version__ = "0.1.0"
ROOT = Path(__file__).parent.parent  # where models, seqrec and params.yaml lie
