"""One Kubeflow step per stage: declarations only, the work is in seqrec.stages.

KFP copies a step's source into the container, where its authoring names are hidden: steps import what they call inside
their body, and no other code imports these modules. Nor can they postpone annotations, which KFP reads as types.
"""
