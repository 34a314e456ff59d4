"""Prefetching: the next batch is built while the current step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


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
