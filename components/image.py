"""The image that every step runs in."""

from __future__ import annotations

import os

IMAGE = os.environ.get("SEQREC_IMAGE", "seqrec:latest")  # on a cluster repo@sha256:...: KFP caches on this string
