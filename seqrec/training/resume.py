"""Exact resume: saves and restores the components of a training, which hold all that changes while it runs.

The state of a component consists of tensors and of values that JSON can hold, by name. Every process asks for it at the
same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from seqrec.artifacts import ROOT, DamagedError, read_json, replaced, sha256
from seqrec.code_closure import deciding
from seqrec.training.tensors import below, load_tensors, write_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)


def fingerprint(module: str, model: str, config: Any, *files: Path) -> str:
    """Return the hash of everything a training depends on: config, input files, and the code of two modules.

    `module` is that of the stage and `model` that of the model, by their dotted names. The text of `config` says what
    else the result depends on.
    """
    digest = hashlib.sha256(f"{module} {config!r} torch {torch.__version__}".encode())
    for path in deciding(module, model, root=ROOT):
        digest.update(f"{path.as_posix()} {sha256(ROOT / path)}".encode())
    for path in files:
        digest.update(f"{path.name} {sha256(path)}".encode())
    return digest.hexdigest()[:32]


class ResumeState:
    """States of an unfinished training in `state/<fingerprint>/step-N/`; the newest undamaged one is resumed.

    They are neither DVC outputs nor MLflow artifacts, and are deleted once the training has succeeded.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.directory = root / fingerprint

    def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Write tensors and JSON values as a state; once it is on the disk, delete the earlier ones.

        Raises:
            OSError: writing failed, for example on a full disk; the previous state is kept.
        """
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        facts = {name: value for name, value in values.items() if name not in tensors}
        final = self.directory / f"step-{step}"
        with replaced(final) as partial:  # waits for the disk once, for all of it
            write_tensors(partial / "state.safetensors", tensors)
            (partial / "state.json").write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
        for old in self.directory.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> dict[str, Any] | None:
        """Return the newest state that can be read, or None; a damaged one is skipped with a warning."""
        steps = sorted(self.directory.glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))
        for folder in reversed(steps):
            try:
                return load_tensors(folder / "state.safetensors") | read_json(folder / "state.json")
            except (DamagedError, FileNotFoundError) as error:
                logger.warning("a resume state cannot be used; trying an earlier one: %s", error)
        return None

    def delete(self) -> None:
        """Delete every state of this training."""
        shutil.rmtree(self.directory, ignore_errors=True)


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
    if accelerator.is_main_process:
        state.save(step, values)


def restore(components: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Let each component continue from its part of a resume state."""
    for name, component in components.items():
        component.load_state_dict(below(f"{name}.", saved))
