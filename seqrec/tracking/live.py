"""Where a training logs its epochs as they end. MLflow is imported only where it is used."""

from __future__ import annotations

import os
from contextlib import nullcontext

from seqrec.config import RegisterConfig
from seqrec.training.progress import LogEpoch, OpenLog, unlogged


def epoch_log(experiment: str, log: LogEpoch | None = None) -> OpenLog:
    """Return what opens the log: `log` if given, else MLflow if MLFLOW_TRACKING_URI is set.

    Without either, the stage `register` logs the epochs.
    """
    if log is not None:
        return lambda *_: nullcontext(log)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        return unlogged
    from seqrec.tracking.runs import live_run

    config = RegisterConfig(experiment=experiment)
    return lambda fingerprint, title: live_run(fingerprint, title, config)
