"""Exact resume: saves and restores the components of a training, which hold all that changes while it runs.

The state of a component consists of tensors and of values that JSON can hold, by name. Every process asks for it at the
same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from seqrec.training.checkpoint import ResumeState, below

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class RandomState:
    """The states of torch's global generators, of all processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return the states, a row per process."""
        device = self.accelerator.device
        states = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return {name: self.accelerator.gather(value.to(device)[None]).cpu() for name, value in states.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators of this process, unless more processes run than were saved."""
        process = self.accelerator.process_index
        if process < len(state_dict["cpu"]):
            torch.set_rng_state(state_dict["cpu"][process])
        if "cuda" in state_dict and self.accelerator.device.type == "cuda" and process < len(state_dict["cuda"]):
            torch.cuda.set_rng_state(state_dict["cuda"][process])


def save(state: ResumeState, step: int, components: Mapping[str, Stateful], accelerator: Accelerator) -> None:
    """Write the components' states as the resume state of `step`; raise OSError if that fails."""
    values = {
        f"{name}.{key}": value
        for name, component in components.items()
        for key, value in component.state_dict().items()
    }
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if accelerator.is_main_process:
        state.save(step, tensors, {name: value for name, value in values.items() if name not in tensors})


def load(state: ResumeState) -> dict[str, Any] | None:
    """Return the newest resume state, or None."""
    found = state.load()
    return None if found is None else {**found[0], **found[1]}


def restore(components: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Let each component continue from its part of a resume state."""
    for name, component in components.items():
        component.load_state_dict(below(f"{name}.", saved))
