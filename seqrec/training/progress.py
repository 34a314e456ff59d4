"""Progress of an epoch: running sums, the progress bar on a terminal, and the log line."""

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
FIGURE = "figure/"  # prefix of values that a model reports besides its loss terms
LogEpoch = Callable[[dict[str, Any], int], None]  # called with an epoch's record and the number of epochs so far


class EpochMeter:
    """Sums over the current epoch: loss, loss terms, targets and time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums = torch.zeros(0, device=device)  # sums over the steps: of the loss and of each term
        self.names: list[str] = []  # names of the sums
        self.targets = 0  # since `start`, over all processes
        self.began = time.monotonic()

    def start(self) -> None:
        """Start measuring speed; a resumed epoch keeps its sums."""
        self.began, self.targets = time.monotonic(), 0

    def add(self, loss: Tensor, terms: Mapping[str, Tensor]) -> None:
        """Add a step, without waiting for the device."""
        values = torch.stack([loss, *terms.values()]).detach().float()
        self.names = ["loss", *(name if name.startswith(FIGURE) else f"loss/{name}" for name in terms)]
        self.sums = values if len(self.sums) == 0 else self.sums + values

    def clear(self) -> None:
        """Reset the sums for the next epoch."""
        self.sums = torch.zeros(0, device=self.device)

    def targets_per_second(self, seconds: float) -> float:
        """Return the speed, `seconds` after `start`."""
        return self.targets / max(seconds, 1e-9)


class ProgressBar:
    """Shows the steps of a phase and a line of text on a terminal or in a notebook; does nothing elsewhere."""

    def __init__(self, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        notebook = Console().is_jupyter
        shown = shown and (notebook or sys.stderr.isatty())
        # a notebook understands the carriage returns of a terminal; rich's own way needs ipywidgets there
        console = Console(stderr=True, force_jupyter=False, force_terminal=notebook or None)
        self.bar = Progress(*columns, console=console, transient=True, disable=not shown)
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
        """Whether the bar is not shown, as without a terminal."""
        return bool(self.bar.disable)

    def start(self, total: int, completed: int) -> None:
        """Set the number of steps of the phase, in all and completed."""
        self.bar.update(self.task, total=total, completed=completed)

    def show(self, completed: int, text: str) -> None:
        """Show the number of completed steps and a text."""
        self.bar.update(self.task, completed=completed, description=text)


def report_epoch(stage: str, record: Mapping[str, Any], epochs: int) -> None:
    """Log an epoch's record; `epochs` is the maximum number of epochs of the phase."""
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
