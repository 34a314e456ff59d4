"""The site's pages of settings and commands, written from the code: `make docs` calls this through site_hooks.py.

A setting's type, default and range come from its dataclass, its meaning from the comment on its line; a command's flags
come from its parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import textwrap
import typing
from typing import Annotated, Any, Literal

from seqrec import config
from seqrec.__main__ import COMMANDS, command_parser
from seqrec.config.meanings import meanings
from seqrec.models import REGISTRY
from seqrec.models.base import Options

TOP_LEVEL = """\
| key | type | default | meaning |
|---|---|---|---|
| `seed` | int | `42` | seed of `pretrain` and `finetune`, unless they set their own |
| `filter_seen` | bool | `true` | whether a user's past items, but never the target, are removed from the candidates |
| `dataset` | str | required | a key of `datasets` |
| `datasets` | mapping | `{}` | per dataset: values for other sections, and `options` of all models |
| `sources` | list | `[]` | datasets that Recformer, UniSRec and RecGURU pre-train on |
| `leaderboard` | list | all models | keys of `models` that are trained, evaluated and compared |
| `models` | mapping | required | per model: `architecture` (default: its key), `options`, `pretrain`, `finetune` |
"""
NESTED = {  # sections that the page shows in several parts
    "pretrain": [
        ("pretrain and finetune", config.TrainConfig, None),
        ("pretrain alone", config.PretrainConfig, config.TrainConfig),
    ],
    "finetune": [
        ("finetune alone", config.FinetuneConfig, config.TrainConfig),
        ("finetune.counts", config.CountsConfig, None),
    ],
    "tune": [("tune", config.TuneConfig, None), ("tune.spaces.MODEL.SETTING", config.SearchRange, None)],
    "kubernetes": [
        ("kubernetes", config.KubernetesConfig, None),
        ("kubernetes.resources.STEP", config.StepResources, None),
        ("kubernetes.launch.STEP", config.LaunchConfig, None),
    ],
}
PARTS = [  # key in params.yaml, its dataclass, and the dataclass whose fields have a table of their own
    part for name, section in config.SECTIONS.items() for part in NESTED.get(name, [(name, section, None)])
]


def settings() -> str:
    """Return the page of all keys of params.yaml and of all options of the models."""
    text = "# Settings\n\n" + textwrap.dedent(
        """\
        All keys of params.yaml. Keys that are left out have the default below. A value in a model's entry takes
        precedence over one in the dataset's entry, and that one over the section. Unknown keys, wrong types and values
        out of range are errors that name the key. Write `1.0e-3`, because YAML reads `1e-3` as text.

        ## Top level

        """
    )
    text += TOP_LEVEL
    for key, section, listed in PARTS:
        text += f"\n## {key}\n\n{_summary(section)}\n\n{_table(section, listed, ranges=True)}"
    text += f"\n## Options of every model\n\n`models.MODEL.options`.\n\n{_table(Options, None, ranges=False)}"
    for name, model in REGISTRY.items():
        module = inspect.getdoc(sys.modules[model.__module__]) or ""
        text += f"\n### {name}\n\n{' '.join(module.split(chr(10) * 2)[0].split())}\n\n"
        text += _table(model.Options, Options, ranges=False)
    return text


def commands() -> str:
    """Return the page of all commands with their flags."""
    text = "# Commands\n\n`python -m seqrec COMMAND`. Exit status: 0 success, 1 failure, 2 wrong usage.\n\n"
    text += "".join(f"- [{name}](#{name}): {command.summary}\n" for name, command in COMMANDS.items())
    text += "\nEvery command also takes `--verbose` (log more, show tracebacks).\n"
    for name in COMMANDS:
        parser = command_parser(name)
        text += f"\n## {name}\n\n{parser.description}\n\n"
        actions = [a for a in parser._actions if not {"-h", "-v"} & set(a.option_strings)]
        if actions:
            text += "| flag | default | meaning |\n|---|---|---|\n" + "".join(map(_flag, actions))
    return text


def _flag(action: Any) -> str:
    name = f"`{next(iter(action.option_strings), action.metavar)}{' ...' if action.nargs == '+' else ''}`"
    none = action.default in (None, False, argparse.SUPPRESS)
    default = "required" if action.required else "" if none else f"`{action.default}`"
    return f"| {name} | {default} | {_cell((action.help or '').replace('%%', '%'))} |\n"


def _summary(section: type) -> str:
    return (inspect.getdoc(section) or "").split("\n\n")[0]


def _table(cls: type, listed: type | None, ranges: bool) -> str:
    """Return a row for each field of a dataclass that `listed` lacks, or has with another default."""
    known = {field.name: field.default for field in dataclasses.fields(listed)} if listed else {}
    hints, texts, rows = typing.get_type_hints(cls, include_extras=True), meanings(cls), ""
    for field in dataclasses.fields(cls):
        if field.name in known and known[field.name] == field.default:
            continue
        kind, limit = _type(hints[field.name])
        limit = f"{limit} | " if ranges else ""
        rows += f"| `{field.name}` | {kind} | {_default(field)} | {limit}{_cell(texts.get(field.name, ''))} |\n"
    head = "| key | type | default | range | meaning |\n|---|---|---|---|---|\n"
    return (head if ranges else head.replace("range | ", "").replace("|---", "", 1)) + rows if rows else "None.\n"


def _type(hint: Any) -> tuple[str, str]:
    kind, *limits = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if typing.get_origin(kind) is Literal:
        values = ", ".join(f"`{value}`" if value != "" else "empty" for value in typing.get_args(kind))
        return values, ", ".join(map(str, limits))
    name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")
    return _cell(name.replace("seqrec.config.sections.", "")), ", ".join(map(str, limits))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`" if field.default != "" else "empty"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
