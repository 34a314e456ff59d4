"""The share of the peak of the machine that a training uses, and what its time goes to."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from seqrec.evaluation.cost import FlopCounter
from seqrec.training.cost import FIRST_STEPS

logger = logging.getLogger(__name__)
PROFILED = 3  # steps
PEAK_S, PEAK_PRODUCTS = 0.5, 4  # least seconds and number of matrix products of one size
GROUPS = {  # what takes time -> parts of the names of its operators
    "attention": ("scaled_dot_product", "flash", "fmha"),
    "matrix products": ("mm", "linear", "conv"),
    "the optimiser": ("adam", "foreach"),
}
OTHERS = "memory traffic and small operators"


class Utilisation:
    """Measures a few steps after the first `FIRST_STEPS` of a long training, without a change to their results."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device, self.precision = device, precision
        self.wanted = False  # set once the training is known to be long
        self.flops = 0.0  # of a target
        self.shares: dict[str, float] = {}  # what takes time -> share of it

    def around(self, step: int, targets: int) -> AbstractContextManager[object]:
        """Return the context of step `step` (0-based) of the training, which has `targets` targets."""
        if self.wanted and step == FIRST_STEPS:
            return self._counted(targets)
        if self.wanted and FIRST_STEPS < step <= FIRST_STEPS + PROFILED:
            return self._profiled()
        return nullcontext()

    def report(self, title: str, targets_per_second: float) -> None:
        """Log speed, share of the peak, and what takes the time; nothing if the steps were not measured."""
        if not self.shares:
            return
        peak = matmul_peak(self.device, self.precision)
        total = sum(self.shares.values())
        parts = sorted(((share / total, name) for name, share in self.shares.items()), reverse=True)
        share = targets_per_second * self.flops / peak
        logger.info(
            f"{title}: {targets_per_second:,.0f} targets/s, {share:.0%} of the peak of this machine"
            f" ({peak / 1e9:,.0f} GFLOP/s in matrix products of {self.precision}; a target takes "
            f"{self.flops / 1e6:.2f} MFLOP); the time goes to {', '.join(f'{name} {s:.0%}' for s, name in parts)}"
        )

    @contextmanager
    def _counted(self, targets: int) -> Iterator[None]:
        with FlopCounter() as counter:
            yield
        self.flops = counter.flops / max(targets, 1)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print its starts and stops
        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            yield
        for operator in profiled.key_averages():
            spent = operator.self_device_time_total if on_gpu else operator.self_cpu_time_total
            group = _group(operator.key)
            self.shares[group] = self.shares.get(group, 0.0) + spent


def _group(operator: str) -> str:
    name = operator.lower()
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), OTHERS)


def matmul_peak(device: torch.device, precision: str) -> float:
    """Return the best rate of a matrix product on `device` now, in FLOP per second.

    Small products are over before other work takes the core; on many cores, large ones are faster.
    """
    sizes = (8192,) if device.type == "cuda" else (1536, 512)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)  # the training's own would change the training
    best = 0.0
    for size in sizes:
        factor = torch.randn(size, size, device=device, dtype=dtype, generator=generator)  # ones take less power
        out = torch.empty_like(factor)
        until, products = time.perf_counter() + PEAK_S, 0
        while (began := time.perf_counter()) < until or products < PEAK_PRODUCTS:
            products += 1
            torch.mm(factor, factor, out=out)
            float(out[0, 0])  # waits for the device
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
