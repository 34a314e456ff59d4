"""Serving: recommendations from a trained model, in Python, over HTTP, as an ONNX graph."""
