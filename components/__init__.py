"""One Kubeflow step per stage: declarations only, the work is in seqrec.stages.

KFP copies a step's source into the container, where its authoring names are hidden: steps import what they call inside
their body, and no other code imports these modules. Nor can they postpone annotations, which KFP reads as types.
"""

from __future__ import annotations

import os

IMAGE = os.environ.get("SEQREC_IMAGE", "seqrec:latest")  # on a cluster repo@sha256:...: KFP caches on this string
