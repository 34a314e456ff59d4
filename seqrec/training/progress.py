"""How far an epoch is: its sums, the progress bar on a terminal, the line in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from seqrec.training.validation import ACCURACY, METRIC

logger = logging.getLogger(__name__)
FIGURE = "figure/"  # prefix of what a model reports besides the terms of its loss
LogEpoch = Callable[[dict[str, Any], int], None]  # gets an epoch's record and the number of epochs before it


class EpochMeter:
    """Sums of the running epoch: loss, its terms, targets and time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums = torch.zeros(0, device=device)  # over the epoch's steps: of the loss, and of each term
        self.names: list[str] = []  # of the sums
        self.targets = 0  # since `start`, over all processes
        self.began = time.monotonic()

    def start(self) -> None:
        """Begin to measure speed; a resumed epoch keeps its sums."""
        self.began, self.targets = time.monotonic(), 0

    def add(self, loss: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Add a step; does not wait for the device."""
        values = torch.stack([loss, *terms.values()]).detach().float()
        self.names = ["loss", *(name if name.startswith(FIGURE) else f"loss/{name}" for name in terms)]
        self.sums = values if len(self.sums) == 0 else self.sums + values

    def clear(self) -> None:
        """Forget the sums: the next epoch begins."""
        self.sums = torch.zeros(0, device=self.device)

    def targets_per_second(self, seconds: float) -> float:
        """Return the speed over `seconds` since `start`."""
        return self.targets / max(seconds, 1e-9)


class ProgressBar:
    """Steps done of a phase, and a line of text, on a terminal; elsewhere nothing."""

    def __init__(self, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = shown and sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    @property
    def hidden(self) -> bool:
        """Whether there is no terminal to show it on."""
        return bool(self.bar.disable)

    def start(self, total: int, completed: int) -> None:
        """Set the steps of the phase."""
        self.bar.update(self.task, total=total, completed=completed)

    def show(self, completed: int, text: str) -> None:
        """Set the steps done and the text."""
        self.bar.update(self.task, completed=completed, description=text)


def report_epoch(stage: str, record: Mapping[str, Any], epochs: int) -> None:
    """Write an epoch's record to the log; `epochs` is the most that its phase may take."""
    metric = "".join(f"  {name} {record[name]:.4f}" for name in (METRIC, ACCURACY) if name in record)
    logger.info(
        "%s %s epoch %d/%d  loss %.4f%s  %.0f targets/s  %.1f s",
        stage,
        record["phase"],
        record["epoch"],
        epochs,
        record["loss"],
        metric,
        record["targets_per_second"],
        record["seconds"],
    )
