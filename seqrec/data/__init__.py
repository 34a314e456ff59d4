"""Data: catalogue of sources, expectations, splits, sequences."""
