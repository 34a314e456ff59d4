"""The cost of a training: seconds, estimated from its first steps, and memory."""

from __future__ import annotations

import copy
import ctypes
import logging
import resource
import sys
import time
from itertools import islice
from typing import NamedTuple

import torch
from accelerate import Accelerator

from seqrec.config import TrainConfig
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import ranking
from seqrec.models.base import SequenceModel
from seqrec.training import contrast
from seqrec.training.examples import Examples
from seqrec.training.progress import EpochMeter
from seqrec.training.step import TrainingStep

logger = logging.getLogger(__name__)
FIRST_STEPS = 10  # steps from which the duration of the whole training is estimated
LONG_S = 60.0  # the estimate is logged for trainings longer than this
PROBE_CASES = 512  # validation cases ranked to estimate the duration of a whole validation


class Cost(NamedTuple):
    """What training costs on this machine, estimated from a few steps and a sample of the validation cases."""

    step_s: float
    steps: int  # of an epoch
    validation_s: float
    memory: int  # bytes: the peak so far, of the process or of the accelerator

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch and its validation."""
        return self.step_s * self.steps + self.validation_s


def measure(
    model: SequenceModel,
    data: Sequences,
    *,
    stage: str,
    config: TrainConfig,
    filter_seen: bool,
    accelerator: Accelerator,
) -> Cost:
    """Return the cost of an epoch of the first phase. The steps train a copy of the model."""
    contrast.check(config, model, stage)
    device = accelerator.device
    model, data = copy.deepcopy(model).to(device), data.to(device, resident=config.resident)
    with torch.random.fork_rng():
        phase = model.phases(stage)[0]
        model.enter(phase)
        examples, step = Examples(data, config, accelerator), TrainingStep(model, data.count, config, accelerator)
        model.eval()
        with torch.no_grad():
            model.on_epoch()
        model.train()
        steps = examples.draw(model, phase)
        step.optimizers.rate = 0.0
        seconds = []
        for example in islice(examples.build(0, 0), FIRST_STEPS + 1):
            began = time.monotonic()
            loss, _, _ = step(example)
            float(loss)  # waits for the device
            seconds.append(time.monotonic() - began)
        usual = seconds[1:] or seconds  # the first step also allocates memory
        validation_s = _validation_seconds(model, data, filter_seen)
    return Cost(sum(usual) / len(usual), steps, validation_s, peak_memory(device))


def _validation_seconds(model: SequenceModel, data: Sequences, filter_seen: bool) -> float:
    cases = sequences.cases(data, "valid")
    some = Cases(*(values[:: max(1, len(cases) // PROBE_CASES)] for values in (cases.user, cases.position)))
    began = time.monotonic()
    ranking.rank(ranking.model_scorer(model.eval()), data, some, filter_seen=filter_seen, both=False)
    return (time.monotonic() - began) * len(cases) / max(1, len(some))


def announce(title: str, epochs: int, total: int, meter: EpochMeter) -> bool:
    """Return whether a phase of `total` steps is long; then log the longest that it can take, and its memory.

    `meter` holds the first FIRST_STEPS steps.
    """
    float(meter.sums[0])  # waits for the device
    seconds = meter.seconds / FIRST_STEPS * total
    if seconds > LONG_S:
        logger.info(
            f"{title}: at most {seconds / 60:.0f} min of training ({epochs} epochs), plus validation; "
            f"early stopping may end it sooner. Memory so far: {peak_memory(meter.device) / 1e9:.1f} GB"
        )
    return seconds > LONG_S


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held so far: on a GPU those of its tensors there, else all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks. By default each step returns them, and every page has to be faulted in again."""
    if (libc := _glibc()) is not None:
        libc.mallopt(ctypes.c_int(-1), ctypes.c_int(2**31 - 1))  # M_TRIM_THRESHOLD
        for threshold in (2**25, 2**30):  # M_MMAP_THRESHOLD; an older glibc refuses more than 2^25
            libc.mallopt(ctypes.c_int(-3), ctypes.c_int(threshold))


def return_freed_memory() -> None:
    """Return freed blocks to the system. Kept for good, they grow by gigabytes: aligned ones are rarely reused."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") else None
