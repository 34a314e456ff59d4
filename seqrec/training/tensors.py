"""Safetensors files, which appear by a rename, and mappings from names to tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqrec.artifacts import whole, written


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a safetensors file atomically; raise OSError if that fails."""
    with written(path) as partial:
        write_tensors(partial, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to the safetensors file `path`; raise OSError if that fails."""
    path.touch()
    mode = path.stat().st_mode  # safetensors writes a file that only its owner may read
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file.

    Raises:
        DamagedError: it is no such file, or not complete.
    """
    with whole(path):
        return load_file(path)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and values."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        content.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity; waits for the device once."""
    floating = {name: value for name, value in tensors.items() if value.is_floating_point()}
    finite = torch.stack([value.isfinite().all() for value in floating.values()]).tolist() if floating else []
    return [name for name, good in zip(floating, finite, strict=True) if not good]


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
