"""The command line: `python -m seqrec STAGE ...`.

A command is a plain function; its keyword-only parameters are the flags, a list before them is what is named without
a flag. A parameter whose type is a section, such as `ServeConfig`, has a flag for each of its fields. `config` and its
like come from params.yaml.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import logging
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqrec import __version__

if TYPE_CHECKING:  # at run time each command imports what it needs: `--help` answers at once
    from seqrec.config import ModelConfig, Params
    from seqrec.pipeline import Stage

COMMANDS = {  # name -> (module, function, what it does); modules are imported when called, some take seconds
    "settings": ("seqrec.commands.settings", "settings", "check params.yaml; write what each stage of dvc.yaml reads"),
    "ingest": ("seqrec.stages.ingest", "ingest", "fetch a dataset and read it into the canonical tables"),
    "validate": ("seqrec.stages.validate", "validate", "check the tables; stop the run if a critical rule fails"),
    "accept-baseline": ("seqrec.stages.validate", "accept_baseline", "accept this data as the baseline of drift"),
    "prepare": ("seqrec.stages.prepare", "prepare", "filter, number, order and split the interactions"),
    "pretrain": ("seqrec.stages.pretrain", "pretrain", "build a model and run its pre-training, if it has any"),
    "finetune": ("seqrec.stages.finetune", "finetune", "train a model for the next item; resumes by itself"),
    "baselines": ("seqrec.stages.baselines", "baselines", "evaluate popularity, a Markov chain, EASE, PCTM, rules"),
    "evaluate": ("seqrec.stages.evaluate", "evaluate", "rank every test case among the whole catalogue"),
    "register": ("seqrec.stages.register", "register", "leaderboard, MLflow runs, candidate and champion"),
    "refit": (
        "seqrec.commands.refit",
        "refit",
        "train the champion again on every event, and serve the result",
    ),
    "registry": ("seqrec.commands.registry", "registry", "show the registered versions; promote one, or roll back"),
    "run": ("seqrec.commands.run", "run", "run every stage except register, in one process, without DVC"),
    "benchmark": ("seqrec.commands.benchmark", "benchmark", "compare the models of a config under several seeds"),
    "auto": ("seqrec.commands.auto", "auto", "find the best model for a file within a time budget"),
    "import": ("seqrec.commands.run", "import_run", "register a finished `run` in MLflow"),
    "repro": ("seqrec.commands.repro", "repro", "run the stages that are out of date, with DVC"),
    "ui": ("seqrec.commands.ui", "ui", "open MLflow where the models of the last run are compared"),
    "leaderboard": ("seqrec.evaluation.leaderboard", "show", "print the leaderboard of the last run"),
    "recommend": ("seqrec.commands.recommend", "recommend", "print the champion's recommendations for a history"),
    "score": ("seqrec.commands.recommend", "score", "write recommendations for every user to a Parquet file"),
    "export": (
        "seqrec.serving.onnx_graph",
        "export",
        "write a model as an ONNX graph from histories to items",
    ),
    "serve": ("seqrec.serving.http", "serve", "serve the champion over HTTP; a new one takes over"),
    "events": ("seqrec.commands.events", "events", "the service's store: import training data, dump for ingest"),
    "keys": ("seqrec.commands.keys", "keys", "API keys of the service: add, rotate, revoke"),
    "compare": (
        "seqrec.evaluation.compare",
        "compare",
        "paired gain of a run over others on one split; or spread over seeds",
    ),
    "tune": ("seqrec.training.tune", "tune", "search the settings of a model on validation; continues by itself"),
}
logger = logging.getLogger("seqrec")


class TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is at the moment: while a progress bar is shown, to the lines above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> typing.TextIO:
        """The standard error of this moment."""
        return sys.stderr


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 success, 1 a failure that the message explains, 2 wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {name:16} {text}" for name, (_, _, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="seqrec",
        description=f"commands:\n{listing}\n\n`seqrec COMMAND --help` shows its flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    module, name, summary = COMMANDS[chosen.command]
    function = getattr(importlib.import_module(module), name)
    flags = command_parser(chosen.command, summary, function).parse_args(chosen.rest)
    from seqrec import redaction

    handler = TerminalHandler()
    handler.setFormatter(redaction.Formatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG if flags.verbose else logging.INFO, handlers=[handler])
    sys.excepthook = redaction.excepthook
    logging.getLogger("seqrec").setLevel(logging.DEBUG if flags.verbose else logging.INFO)
    for noisy in ("urllib3", "filelock", "matplotlib", "alembic", "great_expectations", "mlflow"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        values = function(**bind(function, chosen.command, flags))
        if flags.metrics is not None:
            from seqrec.artifacts import write_json

            write_json(flags.metrics, dict(values or {}))
    except (ValueError, OSError, FloatingPointError) as error:
        if flags.verbose:
            raise
        logger.error("%s: %s", chosen.command, redaction.redacted(str(error)))
        return 1
    return 0


def command_parser(command: str, summary: str, function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Return the parser of one command, its flags read off the signature of `function`."""
    parser = argparse.ArgumentParser(prog=f"seqrec {command}", description=f"{summary.capitalize()}.")
    texts = _argument_texts(function)
    stage = _stage(command)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = typing.get_type_hints(function)[name]
        flag, text = f"--{name.replace('_', '-')}", texts.get(name, "")
        if name in FROM_PARAMS:
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parser.add_argument(name, nargs="+", help=text, metavar=name.removesuffix("s").upper())
        elif dataclasses.is_dataclass(hint):
            _add_section(parser, hint)
        elif _is_dataset_of_params(parameter):
            parser.add_argument(flag, help="its key in `datasets`; default: the key `dataset` of params.yaml")
        elif stage is not None and name in stage.places:
            text = f"{text} (default: {stage.places[name]})"
            parser.add_argument(flag, type=Path, help=text, metavar=name.upper())
        else:
            _add_flag(parser, name, hint, parameter.default, text)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings (default: %(default)s)")
    text = f" (default: {stage.metrics})" if stage is not None and stage.metrics else ""
    parser.add_argument("--metrics", type=Path, help=f"write the returned figures to this JSON file{text}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    return parser


def _stage(command: str) -> Stage | None:
    """Return the stage of the pipeline that a command runs, if it runs one."""
    if not COMMANDS[command][0].startswith("seqrec.stages."):
        return None
    from seqrec.pipeline import BY_NAME

    return BY_NAME.get(command)


def _add_section(parser: argparse.ArgumentParser, section: Any) -> None:
    """Add a flag for each field of a section."""
    from seqrec.config.meanings import meanings

    hints, texts = typing.get_type_hints(section), meanings(section)
    for field in dataclasses.fields(section):
        _add_flag(parser, field.name, hints[field.name], field.default, texts[field.name].replace("%", "%%"))


def _add_flag(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=text)
        return
    required = default in (inspect.Parameter.empty, dataclasses.MISSING)
    kind = next((t for t in (int, float, Path) if t in (hint, *typing.get_args(hint))), str)
    value = None if required else default
    parser.add_argument(flag, required=required, default=value, type=kind, help=text, metavar=name.upper())


def _is_dataset_of_params(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is the dataset of params.yaml; a command with a config of its own has a default."""
    return parameter.name == "dataset" and parameter.default is inspect.Parameter.empty


def bind(function: Callable[..., Any], command: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `function`: flags as given, settings from params.yaml."""
    names, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    _check_numbers(function, flags)
    params = None
    if any(name in FROM_PARAMS or _is_dataset_of_params(parameter) for name, parameter in names.items()):
        from seqrec.config import load

        params = load(flags.params)
    values = {}
    for name, parameter in names.items():
        if params is not None and name in FROM_PARAMS:
            values[name] = FROM_PARAMS[name](params, command, flags)
        elif params is not None and _is_dataset_of_params(parameter):
            values[name] = flags.dataset or params.dataset
        elif dataclasses.is_dataclass(hints[name]):
            section: Any = hints[name]
            values[name] = section(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(section)})
        else:
            values[name] = getattr(flags, name)
    stage = _stage(command)
    if stage is not None and params is not None:
        item = stage.names(params, values.get("model") or values.get("dataset") or "")
        values |= {name: Path(path.format(**item)) for name, path in stage.places.items() if values[name] is None}
        if stage.metrics and flags.metrics is None:
            flags.metrics = Path(stage.metrics.format(**item))
    return values


def _check_numbers(function: Callable[..., Any], flags: argparse.Namespace) -> None:
    """Raise ValueError if a number is not finite, or outside of the `Bounds` of its parameter."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds = typing.get_type_hints(function)
    for name in (name for name in hints if kinds[name] in (int, float) and name in flags):
        from seqrec.config.checks import check_value  # some commands have no numbers, and start without this

        check_value(f"--{name.replace('_', '-')}", hints[name], getattr(flags, name))


def _config(params: Params, command: str, flags: argparse.Namespace) -> Any:
    of_register = ("leaderboard", "ui", "refit", "registry", "recommend", "score", "export", "serve")
    sections = {"baselines": "evaluate"} | dict.fromkeys(of_register, "register")
    section = sections.get(command, command)
    return params.section(section, model=getattr(flags, "model", None), dataset=getattr(flags, "dataset", None))


def _architecture(params: Params, _: str, flags: argparse.Namespace) -> ModelConfig:
    return params.model(flags.model)


FROM_PARAMS: dict[str, Callable[[Params, str, argparse.Namespace], Any]] = {
    "config": _config,
    "architecture": _architecture,
    "refit": lambda params, _, __: params.section("evaluate").refit,
    "filter_seen": lambda params, _, __: params.filters_seen(),
    "leaderboard": lambda params, _, __: list(params.leaderboard),
    "params": lambda params, _, __: params.as_dict(),
    "sources": lambda params, _, __: params.sources,
    "log": lambda *_: None,
    "experiment": lambda params, _, __: params.section("register").experiment,
}


def _argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the lines under `Args:` of the docstring by name."""
    lines = inspect.getdoc(function).splitlines() if function.__doc__ else []  # type: ignore[union-attr]
    found = (line.strip().partition(": ") for line in lines if line.startswith("    "))
    return {name: text.replace("%", "%%") for name, colon, text in found if colon and name.isidentifier()}


if __name__ == "__main__":
    sys.exit(main())
