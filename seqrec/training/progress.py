"""Progress of a training: its position, the sums of an epoch, the progress bar on a terminal, and the log line."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from seqrec.evaluation.metrics import SELECTION
from seqrec.training.validation import ACCURACY, EarlyStopping

logger = logging.getLogger(__name__)
FIGURE = "figure/"  # prefix of values that a model reports besides its loss terms
LogEpoch = Callable[[dict[str, Any], int], None]  # called with an epoch's record and the number of epochs so far
OpenLog = Callable[[str, str], AbstractContextManager[LogEpoch | None]]  # of a training's fingerprint and title


def unlogged(fingerprint: str, title: str) -> AbstractContextManager[LogEpoch | None]:
    """Open no log."""
    return nullcontext()


@dataclass
class Position:
    """How far a training has got."""

    phase: int = 0
    epoch: int = 0  # complete epochs of the phase
    batch: int = 0  # complete batches of the current epoch
    step: int = 0  # optimiser steps of the phase
    total_steps: int = 0  # of all phases
    records: list[dict[str, Any]] = field(default_factory=list)  # one per epoch, of all phases

    def advance(self) -> None:
        """Count a step."""
        self.batch += 1
        self.step += 1
        self.total_steps += 1

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.epoch, self.batch = self.epoch + 1, 0

    def end_phase(self) -> None:
        """Go to the start of the next phase."""
        self.phase, self.epoch, self.batch, self.step = self.phase + 1, 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        vars(self).update(state_dict)


class EpochMeter:
    """Sums over the current epoch: loss, loss terms, targets and time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []  # names of the sums
        self.clear()
        self.start()

    def clear(self) -> None:
        """Reset the sums for the next epoch."""
        self.sums = torch.zeros(0, device=self.device)  # sums over the steps: of the loss and of each term
        self.before = 0.0  # seconds of the epoch before an interruption

    def start(self) -> None:
        """Start measuring speed; a resumed epoch keeps its sums."""
        self.began, self.targets = time.monotonic(), 0

    def add(self, loss: Tensor, terms: Mapping[str, Tensor], targets: int) -> None:
        """Add a step, without waiting for the device; `targets` counts those of all processes."""
        values = torch.stack([loss, *terms.values()]).detach().float()
        self.names = ["loss", *(name if name.startswith(FIGURE) else f"loss/{name}" for name in terms)]
        self.sums = values if len(self.sums) == 0 else self.sums + values
        self.targets += targets

    def means(self, batches: int, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over the `batches` of the epoch and over all processes, by name."""
        means = accelerator.reduce(self.sums, reduction="mean") / batches
        return dict(zip(self.names, means.tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Seconds since `start`."""
        return time.monotonic() - self.began

    def targets_per_second(self, seconds: float) -> float:
        """Return the speed, `seconds` after `start`."""
        return self.targets / max(seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the seconds, none between two epochs; the next step names the sums again."""
        return {"sums": self.sums, "before": self.before + self.seconds if len(self.sums) else 0.0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.sums, self.before = state_dict["sums"].to(self.device), state_dict["before"]


class ProgressBar(Progress):
    """Shows the steps of a phase, and its loss and speed, on a terminal or in a notebook; does nothing elsewhere."""

    def __init__(self, title: str, epochs: int, *, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        notebook = Console().is_jupyter
        hidden = not (shown and (notebook or sys.stderr.isatty()))
        # a notebook understands the carriage returns of a terminal; rich's own way needs ipywidgets there
        console = Console(stderr=True, force_jupyter=False, force_terminal=notebook or None)
        super().__init__(*columns, console=console, transient=True, disable=hidden)
        self.title, self.epochs = title, epochs
        self.steps = self.add_task("", total=None)

    def show(self, position: Position, meter: EpochMeter, stopping: EarlyStopping) -> None:
        """Show position, mean loss of the epoch, best validation and speed; waits for the device."""
        if self.disable:
            return
        best = "" if stopping.best < 0 else f"  best {stopping.metric} {stopping.best:.4f}"
        loss, speed = float(meter.sums[0]) / position.batch, meter.targets_per_second(meter.seconds)
        text = f"{self.title} epoch {position.epoch + 1}/{self.epochs}  loss {loss:.4f}{best}  {speed:,.0f} targets/s"
        self.update(self.steps, completed=position.step, description=text)


def report_epoch(title: str, record: Mapping[str, Any], epochs: int) -> None:
    """Log an epoch's record; `epochs` is the maximum number of epochs of the phase."""
    metric = "".join(f"  {name} {record[name]:.4f}" for name in (SELECTION, ACCURACY) if name in record)
    logger.info(
        f"{title} {record['phase']} epoch {record['epoch']}/{epochs}  loss {record['loss']:.4f}{metric}  "
        f"{record['targets_per_second']:.0f} targets/s  {record['seconds']:.1f} s"
    )
