"""The pipeline on Kubeflow."""
