"""The examples that a training sees, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from seqrec.config import TrainConfig
from seqrec.data import ties
from seqrec.data.sequences import Sequences
from seqrec.models.base import SequenceModel
from seqrec.models.optional import self_supervised
from seqrec.training import batches, objectives
from seqrec.training.batches import Windows
from seqrec.training.objectives import Example

T = TypeVar("T")


class Examples:
    """Draws the windows and batches of each epoch, and builds their examples.

    The saved state is that of the generator before the current epoch, so a resumed epoch draws the same batches again.
    """

    def __init__(self, data: Sequences, config: TrainConfig, accelerator: Accelerator) -> None:
        if bool((data.train_stop - data.start < 2).all()):
            raise ValueError("no user has two training events: use longer histories, or another prepare.protocol")
        self.data = self.given = data
        self.config, self.accelerator = config, accelerator
        self.groups = ties.groups(data) if config.ties == "shuffle" else None
        self.generator = torch.Generator().manual_seed(config.seed)
        self.before_epoch = self.generator.get_state()

    def draw(self, model: SequenceModel, phase: str) -> int:
        """Draw the batches of an epoch of the model's phase `phase`; return their number."""
        config, self.options, self.contrastive = self.config, model.options, self_supervised(model, phase)
        if self_supervised(model, phase) and model.by_prefix:
            self.options = replace(model.options, objective="last")
        self.generator.set_state(self.before_epoch)
        if self.groups:
            self.data = ties.shuffled(self.given, *self.groups, self.generator)
        self.windows = batches.windows(self.data, self.options, config, self.generator)
        if self.contrastive:
            number, processes = len(self.windows.user), self.accelerator.num_processes
            self.plan = batches.plan_of_size(number, config.batch_size, processes, self.generator)
        else:
            self.plan = batches.plan(self.windows.width, config.batch_size, self.generator)
        if config.epoch_steps:
            self.plan = self.plan[: config.epoch_steps]  # a random part, as the batches are in random order
        return len(self.plan)

    def build(self, first: int, step: int) -> Iterator[Example]:
        """Yield this process's share of each batch of the epoch from batch `first` on.

        `step` is the number of the first batch's step in the whole training; random numbers follow from it.
        """
        number, device = len(self.plan) - first, self.accelerator.device

        def make(index: int) -> Example:
            return self._example(self.plan[first + index], step + index)

        return map(make, range(number)) if self.config.resident else ahead(make, number, device)

    def _example(self, batch: Tensor, step: int) -> Example:
        example = objectives.example(
            self.data,
            self.options,
            self.config,
            Windows(*(values[batch] for values in self.windows)),
            seed=self.config.seed * 1_000_003 + step,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )
        return objectives.with_target(example) if self.contrastive else example

    def end_epoch(self) -> None:
        """Let the next epoch draw other batches."""
        self.before_epoch = self.generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator before the current epoch."""
        return {"before_epoch": self.before_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.before_epoch = state_dict["before_epoch"]


def ahead(make: Callable[[int], T], number: int, device: torch.device) -> Iterator[T]:
    """Yield make(0), ..., make(`number` - 1); a second thread builds the next while the caller uses the current one.

    At most two batches exist at a time. On a GPU, copies run on a stream of their own, beside the caller's kernels; the
    caller's stream waits for it before each batch.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def build(index: int) -> T:
        with torch.cuda.stream(stream):  # None: no effect
            return make(index)

    with ThreadPoolExecutor(max_workers=1) as pool:
        upcoming = pool.submit(build, 0) if number else None
        for index in range(1, number + 1):
            assert upcoming is not None
            ready = upcoming.result()
            if stream is not None:
                torch.cuda.current_stream(device).wait_stream(stream)
                _record_use(torch.cuda.current_stream(device), ready)
            upcoming = pool.submit(build, index) if index < number else None
            yield ready


def _record_use(stream: torch.cuda.Stream, value: Any) -> None:
    """Record for the allocator that `stream` uses the tensors in `value`."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, tuple):
        for part in value:
            _record_use(stream, part)
