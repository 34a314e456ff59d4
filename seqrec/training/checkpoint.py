"""Models and resume states on disk: safetensors and JSON, never a pickle; every write is one rename."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import models
from models.base import Catalogue, SequenceModel
from seqrec import ROOT
from seqrec.artifacts import COUNTS, MODEL_CARD, TOKENS, WEIGHTS, read_json, sha256, write_json
from seqrec.config import ConfigError, CountsConfig, ModelConfig, parse
from seqrec.counts import term
from seqrec.counts.term import CountTerm

CORE = (
    *("training/losses.py", "training/objectives.py", "evaluation/metrics.py", "training/loop.py"),
    *("evaluation/ranking.py", "training/checkpoint.py", "data/sequences.py"),
    *("counts/table.py", "counts/term.py", "counts/search.py"),
)


def build(config: ModelConfig, catalogue: Catalogue) -> SequenceModel:
    """Return a freshly initialised model; draws from torch's global generator.

    Raises:
        ConfigError: unknown architecture or option, or a value out of range.
    """
    if config.architecture not in models.REGISTRY:
        known = ", ".join(models.REGISTRY)
        raise ConfigError(f"models.*.architecture: {config.architecture!r} is not one of {known}")
    architecture = models.REGISTRY[config.architecture]
    options = parse(architecture.Options, config.options, f"models.{config.architecture}.options")
    try:
        return architecture(options, catalogue._replace(length=options.length))
    except ValueError as error:
        raise ConfigError(f"models.{config.architecture}.options: {error}") from error


def save_model(directory: Path, model: SequenceModel, facts: Mapping[str, Any]) -> None:
    """Write weights, card and tokens, if any, of `model`: all that `load_model` needs; the card also holds `facts`."""
    directory.mkdir(parents=True, exist_ok=True)
    card = dict(facts) | {
        "architecture": next(name for name, cls in models.REGISTRY.items() if cls is type(model)),
        "options": asdict(model.options),
        "catalogue": {key: value for key, value in model.catalogue._asdict().items() if key != "tokens"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {"torch": torch.__version__},
    }
    save_tensors(directory / WEIGHTS, {name: value.detach() for name, value in model.state_dict().items()})
    if model.catalogue.tokens is not None:
        save_tensors(directory / TOKENS, model.catalogue.tokens)
        card["tokens_sha256"] = sha256(directory / TOKENS)
    write_json(directory / MODEL_CARD, card | {"weights_sha256": sha256(directory / WEIGHTS)})


def load_model(directory: Path) -> tuple[SequenceModel, dict[str, Any]]:
    """Return the model saved in `directory`, in eval mode, and its card.

    Raises:
        ValueError: weights or tokens are not those that the card was written for, or of another version's model.
    """
    card = read_json(directory / MODEL_CARD)
    for file, key in ((WEIGHTS, "weights_sha256"), (TOKENS, "tokens_sha256")):
        if key in card and sha256(directory / file) != card[key]:
            raise ValueError(f"{directory / file} differs from what {MODEL_CARD} was written for: refusing to load it")
    tokens = load_file(directory / TOKENS) if "tokens_sha256" in card else None
    config = ModelConfig(architecture=card["architecture"], options=card["options"])
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten: leave the caller's generator alone
        model = build(config, Catalogue(**card["catalogue"], tokens=tokens))
    try:
        model.load_state_dict(load_file(directory / WEIGHTS))
    except RuntimeError as error:
        raise ValueError(
            f"{directory / WEIGHTS} does not fit {card['architecture']} as this version builds it: train it again, or "
            f"use the version it was made with ({error})"
        ) from error
    return model.eval(), card


def save_counts(directory: Path, counts: CountTerm | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Write the count term that belongs to the model in `directory`; return the entry `counts` of its card.

    Args:
        directory: of the model; a term of an earlier training is removed.
        counts: None where there is nothing to add.
        chosen: its values as in CountsConfig, and whatever else is to be known of them.
    """
    (directory / COUNTS).unlink(missing_ok=True)
    if counts is None:
        return dict(chosen)
    save_tensors(directory / COUNTS, counts.tensors())
    return {**chosen, "pairs": len(counts.targets), "sha256": sha256(directory / COUNTS)}


def load_counts(directory: Path, card: Mapping[str, Any]) -> CountTerm | None:
    """Return the count term of the model in `directory`, if its card names one.

    Raises:
        ValueError: it is missing, or not the one that the card was written for.
    """
    chosen = card.get("counts", {})
    if "sha256" not in chosen:
        return None
    path = directory / COUNTS
    if not path.is_file() or sha256(path) != chosen["sha256"]:
        raise ValueError(f"{path} is not what {MODEL_CARD} was written for: refusing to load it")
    found = term.stored(load_file(path), counts_config(chosen))
    if len(found.log_popularity) != card["catalogue"]["num_items"] + 1:
        raise ValueError(f"{path} counts another number of items than {MODEL_CARD} names")
    return found


def counts_config(chosen: Mapping[str, Any]) -> CountsConfig:
    """Return the values of a count term among what a card says of it."""
    return CountsConfig(**{field.name: chosen[field.name] for field in fields(CountsConfig)})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` as safetensors in one step; raise OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    partial.replace(path)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and values."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        content.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def fingerprint(stage: str, config: Any, *files: Path) -> str:
    """Return the hash of all that a training result depends on: stage, config, inputs, and the code that trains."""
    digest = hashlib.sha256(f"{stage} {config!r} torch {torch.__version__}".encode())
    sources = sorted((ROOT / "models").glob("*.py")) + [ROOT / "seqrec" / name for name in CORE]
    for path in (*sources, *files):
        digest.update(f"{path.name} {sha256(path)}".encode())
    return digest.hexdigest()[:32]


class ResumeState:
    """Where an interrupted training stands: `state/<fingerprint>/step-N/`, the newest complete one counts.

    It is no DVC output and no MLflow artifact; it is deleted when the training it belongs to has succeeded.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.directory = root / fingerprint

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a state; the ones before it are deleted once it is complete.

        Raises:
            OSError: the disk is full, say; the previous state is still there.
        """
        partial, final = self.directory / f"partial-{step}", self.directory / f"step-{step}"
        shutil.rmtree(partial, ignore_errors=True)
        save_tensors(partial / "state.safetensors", tensors)
        write_json(partial / "state.json", dict(facts))
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        for old in self.directory.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest complete state, or None."""
        steps = sorted(self.directory.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        if not steps:
            return None
        return load_file(steps[-1] / "state.safetensors"), read_json(steps[-1] / "state.json")

    def delete(self) -> None:
        """Remove every state of this training."""
        shutil.rmtree(self.directory, ignore_errors=True)
