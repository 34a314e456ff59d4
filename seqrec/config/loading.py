"""Reads, completes and checks `params.yaml`, and configs of `run` in the same form.

A setting can stand in the shared section, in a dataset's and in a model's; the model's takes precedence, then the
dataset's. Only `dataset` and `models` are required. By default, sections have their default values, a dataset's
`source` is its own name, a model's `architecture` is its key, and `leaderboard` lists all models.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import yaml

from seqrec.config.checks import ConfigError, Section, check_keys, parse, refuse_secrets, suggestion
from seqrec.config.ranges import AUTO, Seed
from seqrec.config.sections import DATASET_KEYS, MODEL_KEYS, SECTIONS, ModelConfig, SearchRange, launcher

TOP = ("seed", "filter_seen", "dataset", "sources", "leaderboard", *SECTIONS, "datasets", "models")
SEEDED = ("pretrain", "finetune")  # share a seed, so that another seed also means other initial weights
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML reads 1e-3 as text
RESERVED = ("%", "@", "`")  # YAML refuses a text that begins with one of these
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # names of datasets and models are also names of folders


@dataclass(frozen=True, kw_only=True)
class _Top(Section):
    """The values at the top level that belong to no section."""

    seed: Seed = 42
    filter_seen: bool = True


@dataclass(frozen=True)
class Params:
    """`params.yaml` with checked keys; sections are parsed on demand."""

    dataset: str
    sources: tuple[str, ...]
    leaderboard: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]
    datasets: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, Mapping[str, Any]]
    seed: int = 42  # default of `seed` in the sections SEEDED; split and intervals have seeds of their own
    filter_seen: bool = True  # whether a user's past items, but never the target, are removed from the candidates

    def with_overrides(self, changes: Mapping[str, Any]) -> Params:
        """Return these settings with `changes`, which win over every place where the same setting is written.

        Args:
            changes: values by path. A shared path such as finetune.epochs holds for every dataset and model, a path
                below `datasets` or `models` for that entry alone.

        Raises:
            ConfigError: there is no such setting, or its value is wrong.
        """
        content = _copied(self.as_dict())
        for path in sorted(changes, key=_specific):
            _change(content, path, changes[path])
        return from_dict(content)

    def filters_seen(self) -> bool:
        """Return whether past items are removed from the candidates of the run's dataset."""
        return bool(self.dataset_entry(self.dataset).get("filter_seen", self.filter_seen))

    def section(self, stage: str, *, model: str | None = None, dataset: str | None = None) -> Any:
        """Return the parsed section of `stage`; precedence is model, dataset, shared section."""
        dataset = dataset or self.dataset
        values, path = {**_defaults(stage, dataset, self.seed), **self.sections[stage]}, stage
        if own := self.dataset_entry(dataset).get(stage):
            values, path = values | dict(own), f"datasets.{dataset}.{stage}"
        if model is not None and (own := self.model_entry(model).get(stage)):
            values, path = values | dict(own), f"models.{model}.{stage}"
        return parse(SECTIONS[stage], values, path)

    def model(self, name: str) -> ModelConfig:
        """Return architecture and options of `models.<name>`; the dataset's options are defaults and replace `auto`."""
        entry, shared = self.model_entry(name), self.dataset_entry(self.dataset)["options"]
        own = {key: value for key, value in entry["options"].items() if value != AUTO or key not in shared}
        return ModelConfig(architecture=entry["architecture"], options={**shared, **own})

    def space(self, model: str) -> dict[str, SearchRange]:
        """Return the ranges in `tune.spaces.<model>` by setting.

        Raises:
            ConfigError: the model has no ranges, or a setting or range is wrong.
        """
        self.model_entry(model)
        spaces, path = self.section("tune").spaces, f"tune.spaces.{model}"
        if not spaces.get(model):
            raise ConfigError(
                f"{path}: names no setting to search; declare ranges there, as for finetune.learning_rate"
            )
        fields = {s: [f.name for f in dataclasses.fields(SECTIONS[s])] for s in ("pretrain", "finetune")}
        for key in spaces[model]:
            section, _, name = key.partition(".")
            if not name or name not in fields.get(section, [name] if section == "options" else []):
                raise ConfigError(f"{path}.{key}: no such setting; expected pretrain.*, finetune.* or options.*")
        for name in ("counts", "ease_items"):
            if f"finetune.{name}" in spaces[model]:
                raise ConfigError(f"{path}.finetune.{name}: trials are judged without counts; remove it")
        if self.section("tune").epochs and "finetune.epochs" in spaces[model]:
            raise ConfigError(f"{path}.finetune.epochs: tune.epochs sets the same value; remove one of the two")
        return {key: parse(SearchRange, values, f"{path}.{key}") for key, values in spaces[model].items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the content in the form of params.yaml."""
        names = {"dataset": self.dataset, "sources": list(self.sources), "leaderboard": list(self.leaderboard)}
        return (
            {"seed": self.seed, "filter_seen": self.filter_seen}
            | names
            | dict(self.sections)
            | {"datasets": self.datasets, "models": self.models}
        )

    def as_yaml(self) -> str:
        """Return the content as the text of a params.yaml."""
        return yaml.safe_dump(json.loads(json.dumps(self.as_dict())), sort_keys=False)  # tuples become lists

    def dataset_entry(self, name: str, key: str = "dataset") -> Mapping[str, Any]:
        """Return `datasets.<name>`; error messages start with `key`, the setting that refers to it."""
        if name not in self.datasets:
            raise ConfigError(f"{key}: no entry datasets.{name}{suggestion(name, list(self.datasets))}")
        return self.datasets[name]

    def model_entry(self, name: str, key: str = "models") -> Mapping[str, Any]:
        """Return `models.<name>`; error messages start with `key`, the setting that refers to it."""
        if name not in self.models:
            raise ConfigError(f"{key}: no entry models.{name}{suggestion(name, list(self.models))}")
        return self.models[name]


def load(path: Path) -> Params:
    """Read `params.yaml` and check every key of every section, used or not.

    Raises:
        ConfigError: a key or value is wrong; the message names the first one.
    """
    if not path.is_file():
        raise ConfigError(f"{path} not found: run from the project's folder, or give its path")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # all that the parser raises
        raise ConfigError(f"{path} is not valid YAML: {error!s:.500}") from error
    return from_dict(content)


def from_dict(content: Mapping[str, Any]) -> Params:
    """Complete `content`, a mapping in the form of params.yaml, and check its keys and values.

    Raises:
        ConfigError: a key or value is wrong; the message names the first one.
    """
    params = _complete(content)
    for stage, cls in SECTIONS.items():  # layer by layer, so that the message names the right one
        parse(cls, {**_defaults(stage, "", params.seed), **params.sections[stage]}, stage)
    for dataset in (params.dataset, *params.datasets):
        for stage in SECTIONS:
            if stage == "ingest" or params.dataset_entry(dataset).get(stage):  # ingest has a default for each dataset
                params.section(stage, dataset=dataset)
    for model in params.models:
        for stage in ("pretrain", "finetune"):
            if params.model_entry(model).get(stage):
                params.section(stage, model=model)
        params.model(model)
    for name in params.sources:
        params.dataset_entry(name, "sources")
        if name == params.dataset:
            raise ConfigError(f"sources: {name} is the dataset itself; name other datasets to pre-train on")
    job = launcher(params.section("kubernetes").launch.get("prepare", {})) == "job"
    for name in (params.dataset, *params.sources) if job else ():
        if params.section("prepare", dataset=name).engine != "spark":
            raise ConfigError("kubernetes.launch.prepare.launcher: the value job needs prepare.engine: spark")
    for name in params.leaderboard:
        params.model_entry(name, "leaderboard")
    for name in params.section("tune").spaces:
        params.model_entry(name, f"tune.spaces.{name}")
        params.space(name)
    return params


def _copied(value: Any) -> Any:
    """Return a copy of settings in which each entry has mappings of its own: those of a YAML anchor are shared."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list | tuple) else value


def read_changes(text: str) -> dict[str, Any]:
    """Return the changes in a text such as `finetune.epochs=3 leaderboard=[sasrec]`, whose values are YAML.

    Raises:
        ConfigError: a part of the text is not of the form KEY=VALUE, or a quotation mark is not closed.
    """
    changes: dict[str, Any] = {}
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text:.200}: {error}; quote a value with a quotation mark or a backslash") from error
    for part in parts:
        path, equals, value = part.partition("=")
        if not equals or not path:
            raise ConfigError(f"{part}: expected KEY=VALUE, such as finetune.epochs=3")
        if value.startswith(RESERVED):  # as in time_format=%d/%m/%Y
            changes[path] = value
            continue
        try:
            read = float(value) if EXPONENT.fullmatch(value) else yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{path}: {value!r} is not valid YAML; a value with blanks needs quotes") from error
        changes[path] = value if isinstance(read, date) else read  # settings hold dates as text
    return changes


def _specific(path: str) -> int:
    """Return how few trainings a setting is for, so that what is said of one model is kept, in whatever order."""
    section = path.partition(".")[0]
    return 2 + ("datasets", "models").index(section) if section in ("datasets", "models") else section in SECTIONS


def _change(content: dict[str, Any], path: str, value: Any) -> None:
    """Set `path` in `content`, and remove or change what entries of datasets and models say about the same setting."""
    section, *keys = path.split(".")
    if section not in TOP:
        raise ConfigError(f"{path}: unknown key{suggestion(section, TOP)}")
    if section in (*SECTIONS, "datasets", "models") and not keys:
        raise ConfigError(f"{path}: name a setting inside it, such as finetune.epochs or models.sasrec.options.layers")
    if section in ("datasets", "models") and keys[0] not in content[section]:
        raise ConfigError(f"{path}: no entry {section}.{keys[0]}{suggestion(keys[0], list(content[section]))}")
    entries = [e for e in (*content["datasets"].values(), *content["models"].values()) if isinstance(e, dict)]
    if section == "seed":
        for settings in (place.get(seeded) for place in (content, *entries) for seeded in SEEDED):
            if isinstance(settings, dict):
                settings.pop("seed", None)
    elif section == "filter_seen":
        for entry in entries:
            entry.pop("filter_seen", None)
    elif section in SECTIONS:
        for settings in (entry.get(section) for entry in entries):
            if not isinstance(settings, dict) or keys[0] not in settings:
                continue
            if len(keys) > 1 and isinstance(settings[keys[0]], dict):
                _set(settings, keys, value, path)
            else:
                del settings[keys[0]]
    _set(content, [section, *keys], value, path)


def _set(place: Any, keys: Sequence[str], value: Any, path: str) -> None:
    for key in keys[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place
        if not isinstance(place, dict):
            raise ConfigError(f"{path}: {key} is a single value, which holds no settings")
    place[keys[-1]] = value


def _defaults(stage: str, dataset: str, seed: int) -> dict[str, Any]:
    """Return the defaults of a section that depend on the dataset or the top-level seed."""
    if stage == "ingest":
        return {"source": dataset}
    return {"seed": seed} if stage in SEEDED else {}


def _complete(content: Any) -> Params:
    """Fill in defaults for missing parts of `content`, and check its keys, but not its values."""
    check_keys(content, TOP, "")
    refuse_secrets(content, "")
    for key in ("dataset", "models"):
        if key not in content:
            raise ConfigError(f"{key}: missing key")
    datasets = _entries(content.get("datasets", {}), "datasets", DATASET_KEYS)
    models = _entries(content["models"], "models", MODEL_KEYS)
    dataset = _name(content["dataset"], "dataset")
    sources = _names(content.get("sources", []), "sources")
    sections = {stage: _settings(content.get(stage, {}), stage, stage) for stage in SECTIONS}
    if "datasets" not in content or "source" in sections["ingest"]:  # elsewhere a name without entry is a misspelt one
        datasets = {name: _entry({}, name, "datasets", DATASET_KEYS) for name in (dataset, *sources)} | datasets
    return Params(
        dataset=dataset,
        sources=sources,
        leaderboard=_names(content.get("leaderboard", list(models)), "leaderboard"),
        sections=sections,
        datasets=datasets,
        models=models,
        **vars(parse(_Top, {key: content[key] for key in ("seed", "filter_seen") if key in content}, "")),
    )


def _entries(entries: Any, group: str, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the completed entries of `group`, which is datasets or models."""
    if not isinstance(entries, Mapping):
        raise ConfigError(f"{group}: expected a mapping of settings, got {entries!r:.80}")
    return {_name(name, group): _entry(entry, name, group, keys) for name, entry in entries.items()}


def _entry(entry: Any, name: str, group: str, keys: Sequence[str]) -> dict[str, Any]:
    path = f"{group}.{name}"
    check_keys(entry, keys, path)
    sections: dict[str, Any] = {key: {} for key in keys if key not in ("architecture", "filter_seen")}
    full: dict[str, Any] = sections | ({"architecture": name} if "architecture" in keys else {}) | dict(entry)
    return {key: _value(key, value, f"{path}.{key}") for key, value in full.items()}


def _value(key: str, value: Any, path: str) -> Any:
    """Return the checked value of a key in an entry of `datasets` or `models`."""
    if key == "architecture":
        return _name(value, path)
    if key == "filter_seen":
        return parse(_Top, {key: value}, path.removesuffix(f".{key}")).filter_seen
    return _settings(value, key, path)


def _settings(values: Any, stage: str, path: str) -> Mapping[str, Any]:
    """Return the settings of a section with checked keys; those of `options` are left to the architecture."""
    known = [f.name for f in dataclasses.fields(SECTIONS[stage])] if stage in SECTIONS else values
    check_keys(values, known, path)
    return cast(Mapping[str, Any], values)


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"{path}: expected a name of letters, digits, dots and dashes, got {value!r:.80}")
    return value


def _names(values: Any, path: str) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{path}: expected a list of names, got {values!r:.80}")
    names = tuple(_name(value, path) for value in values)
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: list each name once, not {', '.join(names):.200}")
    return names
