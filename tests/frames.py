"""What imports this gets a stack without source, which takes long to find: KFP and torchrun ask for names alone."""

from __future__ import annotations

import inspect
import sys
import traceback


def stack(context: int = 1) -> list[inspect.FrameInfo]:
    frames = traceback.walk_stack(sys._getframe(1))
    return [inspect.FrameInfo(f, f.f_code.co_filename, line, f.f_code.co_name, None, None) for f, line in frames]


inspect.stack = stack
