"""Counts of item pairs in training sequences: baselines of their own, and a term added to the scores of any model."""
