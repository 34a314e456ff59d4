"""The command line: `python -m seqrec COMMAND ...`.

A command is a plain function. Its keyword-only parameters are the flags; an action, or a list, before them has no
flag. A parameter whose type is a section, such as `ServeConfig`, has a flag for each of its fields. The arguments in
`FROM_PARAMS` come from params.yaml instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqrec import __version__
from seqrec.pipeline import BY_NAME, STAGES, Stage

if typing.TYPE_CHECKING:
    from seqrec.config import Params


class Command(NamedTuple):
    """A command; its module is imported when it is called, because some take seconds."""

    place: str  # module:function
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import and return the function; end the process if a package that it needs is not installed."""
        try:
            function: Callable[..., Any] = pkgutil.resolve_name(self.place)
        except ModuleNotFoundError as error:
            from seqrec.artifacts import explained

            sys.exit(f"seqrec: {explained(error)}")
        return function


COMMANDS = {
    "settings": Command(
        "seqrec.commands.settings:settings", "check params.yaml; write the settings file of each DVC stage"
    ),
    **{stage.name: Command(f"seqrec.stages.{stage.name}:{stage.name}", stage.summary) for stage in STAGES},
    "accept-reference": Command(
        "seqrec.commands.reference:accept_reference", "accept data as the reference statistics for drift"
    ),
    "refit": Command("seqrec.commands.refit:refit", "train the champion again on all events; make the result champion"),
    "registry": Command("seqrec.commands.registry:registry", "show the registered versions, promote one or roll back"),
    "run": Command("seqrec.commands.run:run", "run the stages in one process, without DVC"),
    "benchmark": Command("seqrec.commands.benchmark:benchmark", "compare the models of a config under several seeds"),
    "auto": Command("seqrec.commands.auto:auto", "find the best model for a file within a time budget"),
    "import": Command("seqrec.commands.run:import_run", "register the models of a finished `run` in MLflow"),
    "repro": Command("seqrec.commands.repro:repro", "run the stages that are out of date, with DVC"),
    "ui": Command("seqrec.commands.ui:ui", "open the comparison of the last run in MLflow"),
    "leaderboard": Command("seqrec.evaluation.leaderboard:show", "print the leaderboard of the last run"),
    "recommend": Command("seqrec.commands.recommend:recommend", "print the champion's recommendations for a history"),
    "score": Command("seqrec.commands.recommend:score", "write recommendations for every user to a Parquet file"),
    "export": Command("seqrec.serving.onnx_graph:export", "write a model as an ONNX graph"),
    "serve": Command("seqrec.serving.http:serve", "serve the champion over HTTP; switches to a new one by itself"),
    "events": Command("seqrec.commands.events:events", "import into, dump or compare the event store of the service"),
    "keys": Command("seqrec.commands.keys:keys", "show, add, rotate or revoke API keys of the service"),
    "compare": Command("seqrec.evaluation.compare:compare", "compare a run with others case by case"),
    "tune": Command("seqrec.commands.tune:tune", "search the settings of a model on validation; resumes by itself"),
}
FROM_PARAMS = (  # arguments that have no flag; `log` is for callers in Python
    *("config", "architecture", "refit", "filter_seen", "leaderboard", "params", "sources", "experiment", "log"),
)
PARAMS = Path("params.yaml")
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
    listing = "\n".join(f"  {name:16} {command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="seqrec",
        description=f"commands:\n{listing}\n\n`seqrec COMMAND --help` shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.command not in COMMANDS:
        from seqrec.config.checks import suggestion

        parser.error(f"unknown command {chosen.command}{suggestion(chosen.command, list(COMMANDS))}")
    flags = command_parser(chosen.command).parse_args(chosen.rest)
    from seqrec import redaction

    handler = TerminalHandler()
    handler.setFormatter(redaction.Formatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG if flags.verbose else logging.WARNING, handlers=[handler])
    sys.excepthook = redaction.excepthook
    logging.getLogger("seqrec").setLevel(logging.DEBUG if flags.verbose else logging.INFO)
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it sets a level of its own
    try:
        _call(chosen.command, flags)
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if flags.verbose:
            raise
        from seqrec.artifacts import explained

        logger.error("%s: %s", chosen.command, redaction.redacted(explained(error)))
        return 1
    return 0


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, its flags read off the signature of its function."""
    function, summary = COMMANDS[name].load(), COMMANDS[name].summary
    parser = argparse.ArgumentParser(prog=f"seqrec {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    texts, hints = _argument_texts(function), typing.get_type_hints(function)
    stage = BY_NAME.get(name)
    for parameter in inspect.signature(function).parameters.values():
        hint, text = hints[parameter.name], texts.get(parameter.name, "")
        if parameter.name in FROM_PARAMS:
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            metavar = parameter.name.removesuffix("s").upper()
            if typing.get_origin(hint) is typing.Literal:
                parser.add_argument(parameter.name, choices=typing.get_args(hint), help=text, metavar=metavar)
            else:
                parser.add_argument(parameter.name, nargs="+", help=text, metavar=metavar)
        elif dataclasses.is_dataclass(hint):
            _add_section(parser, hint)
        elif _is_dataset_of_params(parameter):
            parser.add_argument("--dataset", help="key in `datasets` (default: `dataset` in params.yaml)")
        elif stage is not None and parameter.name in stage.places:
            _add_flag(parser, parameter.name, Path, None, text + _default(stage, stage.places[parameter.name]))
        else:
            _add_flag(parser, parameter.name, hint, parameter.default, text)
    if stage is not None or _needs_params(function) or any(map(dataclasses.is_dataclass, hints.values())):
        _add_flag(parser, "params", Path, PARAMS, "settings")
    if hints["return"] is not type(None):
        text = _default(stage, stage.metrics) if stage is not None and stage.metrics else ""
        parser.add_argument("--metrics", type=Path, help=f"write the returned figures to this JSON file{text}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    return parser


def _default(stage: Stage, path: str) -> str:
    return f" (default: {path.format(source='', figures='.dataset', item=stage.each.upper())})"


def _add_section(parser: argparse.ArgumentParser, section: Any) -> None:
    """Add a flag for each field of a section."""
    from seqrec.config.meanings import meanings

    hints, texts = typing.get_type_hints(section), meanings(section)
    for field in dataclasses.fields(section):
        text = texts[field.name].replace("%", "%%") + (f" (default: {field.default})" if field.default else "")
        _add_flag(parser, field.name, hints[field.name], argparse.SUPPRESS, text)


def _add_flag(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=text)
        return
    required = default is inspect.Parameter.empty
    kind: Callable[[str], Any] = next((t for t in (str, int, float, Path) if t in (hint, *typing.get_args(hint))), str)
    value = None if required else default
    if typing.get_origin(hint) is Sequence:
        kind, value = _names, ",".join(default)
    if value and value != argparse.SUPPRESS:
        text += " (default: %(default)s)"
    parser.add_argument(flag, required=required, default=value, type=kind, help=text, metavar=name.upper())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _is_dataset_of_params(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is the dataset of params.yaml; a command with a config of its own has a default."""
    return parameter.name == "dataset" and parameter.default is inspect.Parameter.empty


def _needs_params(function: Callable[..., Any]) -> bool:
    """Return whether a command that is not a stage takes some of its arguments from params.yaml."""
    parameters = inspect.signature(function).parameters
    return not parameters.keys().isdisjoint(FROM_PARAMS) or any(map(_is_dataset_of_params, parameters.values()))


def _argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the texts under `Args:` of a docstring, by name; further lines of a text are indented."""
    listed = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".").replace("%", "%%") for name, text in texts}


def _call(name: str, flags: argparse.Namespace) -> None:
    """Run a command, and write its figures to the file that the flag or the stage names."""
    values, stage = bind(name, flags), BY_NAME.get(name)
    if stage is not None:
        _call_stage(stage, values, flags)
        return
    figures = COMMANDS[name].load()(**values)
    if getattr(flags, "metrics", None) is not None:
        from seqrec.artifacts import write_json

        write_json(flags.metrics, figures)


def _call_stage(stage: Stage, values: dict[str, Any], flags: argparse.Namespace) -> None:
    from seqrec.config import load

    params = load(flags.params)
    dataset = params.dataset if stage.each == "dataset" else ""
    if "model" in values:
        params.model_entry(values["model"], "--model")  # an unknown name is an error that suggests one
    item = values.pop("model", None) or values.pop("dataset", None) or dataset
    given = {key: value for key, value in values.items() if value is not None}
    stage(params, Path(), item, metrics=flags.metrics, **given)


def bind(name: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a command from the flags; where it is not a stage, also those from params.yaml."""
    function = COMMANDS[name].load()
    _check_numbers(function, flags)
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    values = {key: _value(key, hints[key], flags) for key in parameters if key not in FROM_PARAMS}
    if name in BY_NAME or not _needs_params(function):
        return values
    params = _settings(flags)
    if any(map(_is_dataset_of_params, parameters.values())):
        values["dataset"] = flags.dataset or params.dataset
    if "params" in parameters:
        values["params"] = params.as_dict()
    if "config" in parameters:
        values["config"] = params.section("register")
    return values


def _value(name: str, hint: Any, flags: argparse.Namespace) -> Any:
    """Return the value of a flag, or a section of params.yaml with the flags that are given."""
    if not dataclasses.is_dataclass(hint):
        return getattr(flags, name)
    from seqrec.config import SECTIONS

    (section,) = (key for key, cls in SECTIONS.items() if cls is hint)
    given = {field.name: getattr(flags, field.name) for field in dataclasses.fields(hint) if field.name in flags}
    return dataclasses.replace(_settings(flags).section(section), **given)


def _settings(flags: argparse.Namespace) -> Params:
    """Return the settings; for a saved model in a folder, the defaults serve where there is no params.yaml."""
    from seqrec.config import from_dict, load

    saved = str(getattr(flags, "saved", "") or ":/")
    if flags.params == PARAMS and not PARAMS.exists() and ":/" not in saved:  # no name in MLflow
        return from_dict({"dataset": "saved", "models": {}})
    return load(flags.params)


def _check_numbers(function: Callable[..., Any], flags: argparse.Namespace) -> None:
    """Raise ValueError if a number is not finite, or outside of the `Bounds` of its parameter."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds = typing.get_type_hints(function)
    for name in (name for name in hints if kinds[name] in (int, float) and name in flags):
        from seqrec.config.checks import check_value  # some commands have no numbers, and start without this

        check_value(f"--{name.replace('_', '-')}", hints[name], getattr(flags, name))


if __name__ == "__main__":
    from seqrec import warm

    status = warm.call("seqrec", sys.argv[1:])
    sys.exit(main() if status is None else status)
