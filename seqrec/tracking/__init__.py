"""Tracking: MLflow runs, the model registry, the champion gate."""
