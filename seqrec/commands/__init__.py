"""Commands of `python -m seqrec` that are no stage of the pipeline."""
