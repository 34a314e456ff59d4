"""seqrec: sequential recommendation as a pipeline, from raw logs to a registered champion."""

__version__ = "0.1.0"
