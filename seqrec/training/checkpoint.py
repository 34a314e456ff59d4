"""Models and resume states on disk: safetensors and JSON, never pickle; every file appears by a rename."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode

from seqrec import ROOT, models
from seqrec.artifacts import (
    COUNTS,
    MODEL_CARD,
    TOKENS,
    WEIGHTS,
    DamagedError,
    read_json,
    replaced,
    sha256,
    whole,
    write_json,
    written,
)
from seqrec.code_closure import deciding
from seqrec.config import ConfigError, CountsConfig, ModelConfig, parse
from seqrec.counts import term
from seqrec.counts.term import CountTerm
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.training import cards

logger = logging.getLogger(__name__)
DTYPES = {  # torch's types under their names in safetensors
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TOKEN_TYPES = {"ids": "I32", "types": "I8", "starts": "BOOL", "offsets": "I64", "special": "I64"}
TOKEN_TYPES |= {"vectors": "F32", "values": "I32"}
COUNT_TYPES = {"offsets": "I64", "targets": "I32", "values": "F32", "weights": "F32", "log_popularity": "F32"}


def build(config: ModelConfig, catalogue: Catalogue) -> SequenceModel:
    """Return a newly initialised model; the values are drawn from torch's global generator.

    Raises:
        ConfigError: unknown architecture or option, or a value out of range.
    """
    if config.architecture not in models.REGISTRY and config.architecture not in models.UNTRAINED:
        known = ", ".join(models.REGISTRY)
        raise ConfigError(
            f"models.*.architecture: {config.architecture!r} is not one of {known}; "
            "seqrec.models.register(NAME, CLASS) adds your own"
        )
    architecture = models.architecture_of(config.architecture)
    options = parse(architecture.Options, config.options, f"models.{config.architecture}.options")
    try:
        return architecture(options, catalogue._replace(length=options.length))
    except ValueError as error:
        raise ConfigError(f"models.{config.architecture}.options: {error}") from error


def save_model(
    directory: Path, model: SequenceModel, facts: Mapping[str, Any], files: Mapping[str, bytes] | None = None
) -> None:
    """Write the weights of `model`, its card, its tokens if it has any, and `files`.

    Args:
        directory: output folder, which `load_model` reads.
        model: the model to save.
        facts: further entries of the card; `cards.FACTS` has the defaults.
        files: vocabulary, users, tokeniser by file name; the card lists their hashes.

    Raises:
        ValueError: a weight is not finite.
    """
    _require_finite(model, directory / WEIGHTS)
    directory.mkdir(parents=True, exist_ok=True)
    card = {**cards.FACTS, **facts} | {
        "architecture": models.name_of(type(model)),
        "options": asdict(model.options),
        "catalogue": {key: value for key, value in model.catalogue._asdict().items() if key != "tokens"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {"torch": torch.__version__},
        "files": cards.write_files(directory, files or {}),
    }
    save_tensors(directory / WEIGHTS, {name: value.detach() for name, value in model.state_dict().items()})
    card.pop("tokens_sha256", None)
    if model.catalogue.tokens is not None:
        save_tensors(directory / TOKENS, model.catalogue.tokens)
        card["tokens_sha256"] = sha256(directory / TOKENS)
    write_json(directory / MODEL_CARD, card | {"weights_sha256": sha256(directory / WEIGHTS)})


def load_model(directory: Path) -> tuple[SequenceModel, dict[str, Any]]:
    """Return the model saved in `directory`, in eval mode, and its card.

    The sizes in the card are compared with the header of the weights before any memory of that size is allocated.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: a file is not the one that the card lists, this version cannot build a model from the card, or a
            weight is not finite.
    """
    card = cards.read(directory)
    sizes = cards.tensors(directory / WEIGHTS)
    tokens = None
    if "tokens_sha256" in card:
        tokens = _load_tokens(directory, card)
    config = ModelConfig(architecture=card["architecture"], options=card["options"])
    catalogue = Catalogue(**card["catalogue"], tokens=tokens)
    _check_sizes(directory / WEIGHTS, card, config, catalogue, sizes)
    cards.verify(directory, card)
    with torch.random.fork_rng(devices=[]):  # the initial values are overwritten; keep the caller's random state
        model = build(config, catalogue)
    model.load_state_dict(load_tensors(directory / WEIGHTS))
    _require_finite(model, directory / WEIGHTS)
    return model.eval(), card


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity; waits for the device once."""
    floating = {name: value for name, value in tensors.items() if value.is_floating_point()}
    finite = torch.stack([value.isfinite().all() for value in floating.values()]).tolist() if floating else []
    return [name for name, good in zip(floating, finite, strict=True) if not good]


def _require_finite(model: SequenceModel, path: Path) -> None:
    if bad := not_finite(model.state_dict()):
        raise ValueError(f"{path}: NaN or infinity in {', '.join(bad)}: train it again, with a smaller learning_rate")


def _load_tokens(directory: Path, card: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tokens of a text model's catalogue; raise ValueError if they do not fit its items."""
    path, rows = directory / TOKENS, card["catalogue"]["num_items"] + 1
    cards.check_file(path, card["tokens_sha256"])
    sizes = cards.tensors(path)
    types = {name: kind for name, (kind, _) in sizes.items()}
    good = bool(types) and all(TOKEN_TYPES.get(name) == kind for name, kind in types.items())
    good &= all(sizes.get(name, ("", (rows, 0)))[1][:1] == (rows,) for name in ("vectors", "values"))
    good &= sizes.get("offsets", ("", (rows + 1,)))[1] == (rows + 1,) and sizes.get("special", ("", (4,)))[1] == (4,)
    if not good:
        raise ValueError(f"{path} does not hold the text of {rows - 1} items")
    tokens = load_tensors(path)
    if "offsets" in tokens and not _well_formed(tokens):
        raise ValueError(f"{path} does not hold the text of {rows - 1} items: its offsets or ids are out of range")
    if "values" in tokens and (tokens["values"].ndim != 2 or bool((tokens["values"] < 0).any())):
        raise ValueError(f"{path} does not hold the attributes of {rows - 1} items")
    return tokens


def _well_formed(tokens: Mapping[str, Tensor]) -> bool:
    if not {"ids", "types", "starts", "special"} <= tokens.keys():
        return False
    ids, offsets = tokens["ids"], tokens["offsets"]
    if not ids.shape == tokens["types"].shape == tokens["starts"].shape == (int(offsets[-1]),):
        return False
    inside = len(ids) == 0 or bool((ids >= 0).all() and (ids < tokens["special"][-1]).all())
    return inside and int(offsets[0]) == 0 and bool((offsets.diff() >= 0).all())


class _NoValues(TorchFunctionMode):
    """Skips the functions that set initial values; they are slow to start on tensors without storage."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "abs_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Raise ValueError as soon as a model registers far more parameters or modules than a file has tensors."""
    counted = {"parameters": 0, "parts": 0}

    def count(kind: str, most: int) -> None:
        counted[kind] += 1
        if counted[kind] > most:
            raise ValueError(f"its options ask for more {kind} than the {parameters} tensors of its file")

    hooks = (
        registration.register_module_parameter_registration_hook(lambda *_: count("parameters", 2 * parameters)),
        registration.register_module_module_registration_hook(lambda *_: count("parts", 64 + 8 * parameters)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_sizes(
    path: Path, card: Mapping[str, Any], config: ModelConfig, catalogue: Catalogue, found: cards.Tensors
) -> None:
    """Compare the tensors of a file with those of the model that a card describes; that model is built without storage.

    Raises:
        ValueError: no model can be built from the card, or its tensors differ from those of the file.
    """
    try:
        with _at_most(len(found)), torch.device("meta"), _NoValues():
            model: nn.Module = build(config, catalogue)
    except ConfigError as error:
        raise ValueError(f"{path.parent / MODEL_CARD}: {error}") from error
    except Exception as error:  # unchecked options can fail in any way
        raise ValueError(
            f"{path.parent / MODEL_CARD}: no {config.architecture} can be built from it: {error}"
        ) from error
    wanted = {name: (DTYPES.get(value.dtype, ""), tuple(value.shape)) for name, value in model.state_dict().items()}
    different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{path} does not fit {config.architecture} as this version builds it: train it again, or use the version "
            f"it was made with ({len(different)} tensors differ: {name} is {found.get(name, 'missing')}, expected "
            f"{wanted.get(name, 'none')})"
        )
    if card["parameters"] != sum(p.numel() for p in model.parameters()):
        raise ValueError(f"{path.parent / MODEL_CARD}: parameters differs from the number in {path}")


def save_counts(directory: Path, counts: CountTerm | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Write the count term of the model in `directory`; return the entry `counts` of its card.

    Args:
        directory: folder of the model; the count term of an earlier training is removed from it.
        counts: the count term; None if the model has none.
        chosen: its settings, as in CountsConfig, and further entries for the card.
    """
    (directory / COUNTS).unlink(missing_ok=True)
    if counts is None:
        return dict(chosen)
    save_tensors(directory / COUNTS, counts.tensors())
    return {**chosen, "pairs": len(counts.targets), "sha256": sha256(directory / COUNTS)}


def load_counts(directory: Path, card: Mapping[str, Any]) -> CountTerm | None:
    """Return the count term of the model in `directory`, or None if its card lists none.

    Raises:
        ValueError: the file is missing, not the one that the card lists, or does not hold a count term of its items.
    """
    chosen = card.get("counts", {})
    if "sha256" not in chosen:
        return None
    path = directory / COUNTS
    cards.check_file(path, chosen["sha256"])
    types = {name: kind for name, (kind, _) in cards.tensors(path).items()}
    if types != COUNT_TYPES:
        raise ValueError(f"{path} does not hold a count term: its tensors are {types!s:.200}, expected {COUNT_TYPES}")
    try:
        config = counts_config(chosen)
    except ValueError as error:
        raise ValueError(f"{directory / MODEL_CARD}: {error}") from error
    try:
        return term.stored(load_tensors(path), config, card["catalogue"]["num_items"])
    except ValueError as error:
        raise ValueError(f"{path} does not hold the count term of {MODEL_CARD}: {error}") from error


def counts_config(chosen: Mapping[str, Any]) -> CountsConfig:
    """Return the settings of a count term from the entry `counts` of a card.

    Raises:
        ConfigError: a value is missing or wrong; the message names it.
    """
    older = {"values": "log", "decay": ""}  # cards without these entries
    named = older | dict(chosen)
    return parse(CountsConfig, {field.name: named.get(field.name) for field in fields(CountsConfig)}, "counts")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a safetensors file atomically; raise OSError if that fails."""
    with written(path) as partial:
        _write_tensors(partial, tensors)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
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
        tensors: dict[str, Tensor] = load_file(path)
        return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and values."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        content.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def fingerprint(module: str, model: str, config: Any, *files: Path) -> str:
    """Return the hash of everything a training depends on: config, inputs, and the code of stage and model.

    Args:
        module: dotted name of the stage.
        model: dotted name of the model's module.
        config: settings, and anything else whose text says what the result depends on.
        files: the inputs.
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

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a state and, once it is complete and on the disk, delete the earlier ones.

        Raises:
            OSError: writing failed, for example on a full disk; the previous state is kept.
        """
        final = self.directory / f"step-{step}"
        with replaced(final) as partial:  # waits for the disk once, for all of it
            _write_tensors(partial / "state.safetensors", tensors)
            (partial / "state.json").write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
        for old in self.directory.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest state that can be read, or None; a damaged one is skipped with a warning."""
        steps = sorted(self.directory.glob("step-*[0-9]"), key=lambda path: int(path.name.removeprefix("step-")))
        for folder in reversed(steps):
            try:
                return load_tensors(folder / "state.safetensors"), read_json(folder / "state.json")
            except (DamagedError, FileNotFoundError) as error:
                logger.warning("a resume state is not used, an earlier one is tried: %s", error)
        return None

    def delete(self) -> None:
        """Delete every state of this training."""
        shutil.rmtree(self.directory, ignore_errors=True)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
