"""Commands of `python -m seqrec` that are not stages of the pipeline."""
