"""The Kubeflow steps: declarations only, the work is in seqrec.stages.

KFP copies a step's source into the container, where its authoring names are hidden: steps import what they call inside
their body. Nor can they postpone annotations, which KFP reads as types.
"""
