"""What imports this collects garbage less often, and gets a stack without source, which takes long to find."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback


def stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Return what KFP and torchrun want, which ask for names alone."""
    frames = traceback.walk_stack(sys._getframe(1))
    return [inspect.FrameInfo(f, f.f_code.co_filename, line, f.f_code.co_name, None, None) for f, line in frames]


inspect.stack = stack
gc.set_threshold(50_000, 20, 20)  # imported packages are a million objects, most of which live on
