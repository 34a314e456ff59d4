"""Cluster: jobs that a pipeline step launches on Kubernetes."""
