"""The command line: flags read off the stages' signatures, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
from support import ROOT, imported

from seqrec import __version__
from seqrec.__main__ import COMMANDS, FROM_PARAMS, bind, command_parser, main
from seqrec.config import ServeConfig
from seqrec.pipeline import BASELINES


@pytest.fixture
def params(tmp_path, monkeypatch) -> Path:
    """A copy of params.yaml in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_flag_with_a_text(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    parameters = inspect.signature(COMMANDS[command].load()).parameters
    positional = {name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
    options = [field.name for field in dataclasses.fields(ServeConfig)] if command == "serve" else []
    names = [*(name for name in parameters if name != "options"), *options]
    assert all(f"  {name.removesuffix('s').upper()}  " in shown for name in positional)
    for flag in (f"--{name.replace('_', '-')}" for name in names if name not in {*FROM_PARAMS, *positional}):
        usage, _, options = shown.partition("options:")
        assert flag in usage
        assert re.search(rf"^  {flag}\b.*(\n {{10,}})? {{2,}}\S", options, re.MULTILINE), f"{flag} has no text"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("recommend", "number of items (default: 10)"),
        ("score", "(default: params.yaml)"),
        ("baselines", "(default: popularity,repeats,"),
        ("serve", "port to listen on; 0: any free one (default: 8000)"),
    ],
)
def test_help_names_the_default(command, text, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flag", "texts"), [("--version", [__version__]), ("--help", [f"  {name} " for name in COMMANDS])]
)
def test_the_version_and_the_listing_of_commands(flag, texts, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([flag])
    shown = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(text in shown for text in texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["leaderbord"], "unknown command leaderbord; did you mean leaderboard?"),
        (["run", "--dataset", "ml-1m"], "the following arguments are required: --config-file, --out"),
        (["auto", "--data", "a", "--out", "b", "--params", "c"], "unrecognized arguments: --params c"),
        (["leaderboard", "--metrics", "a.json"], "unrecognized arguments: --metrics a.json"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_flag_of_several_names_separates_them_by_commas():
    parser = command_parser("baselines")

    assert parser.parse_args([]).names == BASELINES
    assert parser.parse_args(["--names", "pctm, ease"]).names == ("pctm", "ease")


def test_the_flags_of_the_service_win_over_its_section(params):
    params.write_text(params.read_text() + "\nserve: {rate: 5.0, share: 0.3, items: s3://bucket/items.parquet}\n")
    flags = command_parser("serve").parse_args(["--params", str(params), "--rate", "7"])

    options = bind("serve", flags)["options"]

    assert options == ServeConfig(rate=7.0, share=0.3, items="s3://bucket/items.parquet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest", "--dataset", "ml-9m"], "no entry datasets.ml-9m; did you mean ml-"),
        (["evaluate", "--model", "flashrec"], "--model: no entry models.flashrec; did you mean flash4rec?"),
        (["baselines", "--names", "pctm,eas"], "--names: no baseline eas; did you mean ease?"),
        (["leaderboard", "--reports", "nowhere"], "leaderboard.json not found: run `make repro` first"),
        (["import", "--run", "nowhere"], "nowhere is not the output folder of `seqrec run`"),
        (["accept-reference", "--data", "nowhere", "--reference", "b.json"], "not found: run ingest first"),
        (["run", "--config-file", "none.yaml", "--out", "out"], "none.yaml not found"),
        (["run", "--config-file", "params.yaml", "--out", "params.yaml/x"], "params.yaml is a file, but must be a f"),
        (["recommend", "--history", "1", "--saved", "params.yaml"], "params.yaml is a file, but must be a folder"),
        (["score", "--sequences", "params.yaml", "--saved", "params.yaml", "--output", "a.parquet"], "is a file, but"),
        (["keys", "add", "--name", "me", "--keys-file", "params.yaml/a"], "params.yaml is a file, but must be"),
        (["keys", "show", "--days", "5"], "--name, --admin and --days have no effect with show"),
        (["serve", "--keys", "none.json"], "--keys: there is no file none.json"),
        (["serve", "--items", "none.parquet"], "--items: there is no file none.parquet"),
        (["keys", "rotate", "--name", "me", "--keys-file", "none.json"], "none.json"),
        (["keys", "revoke", "--name", "me", "--keys-file", "none.json"], "none.json"),
        (["keys", "show", "--keys-file", "."], ". is a folder, but must be"),
        (["events", "import", "--kinds", "view"], "--kinds has no effect with import, only with dump"),
        (["events", "import", "--output", "a.csv"], "--output has no effect with import, only with dump"),
        (["events", "dump", "--versions", "1,2"], "--versions has no effect with dump, only with compare"),
        (["events", "dump", "--interactions", "a"], "--interactions has no effect with dump, only with import"),
        (["events", "import", "--store", "sqlite:///a", "--interactions", "."], "is a folder, but must be"),
    ],
)
def test_a_mistake_is_one_message_and_exits_with_1(params, caplog, arguments, message):
    assert main(arguments) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert message in caplog.text
    assert caplog.messages[0].startswith(f"{arguments[0]}: ")
    assert "Traceback" not in caplog.text
    assert not Path("none.json.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["auto", "--data", "log.csv", "--out", "out", "--minutes", "nan"], "--minutes must be"),
        (["auto", "--data", "log.csv", "--out", "out", "--minutes", "0"], "--minutes must be"),
        (["auto", "--data", "log.csv", "--out", "out", "--minutes", "1e300"], "--minutes must be more than 0 and at"),
        (["compare", "one", "other", "--confidence", "1"], "--confidence must be"),
        (["recommend", "--history", "1", "--k", "0"], "--k must be at least 1 and at most 100000"),
        (["recommend", "--history", "1", "--k", "9" * 30], "--k must be a finite number"),
        (["score", "--sequences", "s", "--saved", "m", "--output", "o", "--k", "-1"], "--k must be at least 1"),
        (["export", "--saved", "m", "--output", "o", "--k", "0"], "--k must be at least 1"),
        (["baselines", "--ease-items", "-1"], "--ease-items must be at least 0"),
        (["registry", "promote", "--version", "-1"], "--version must be at least 0"),
    ],
)
def test_a_number_out_of_range_is_named_before_anything_runs(params, caplog, arguments, message):
    assert main(arguments) == 1
    assert caplog.messages[0].startswith(f"{arguments[0]}: {message}")
    assert sorted(path.name for path in Path().iterdir()) == ["params.yaml"]


def test_a_package_that_is_not_installed_is_named(params, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for module in ("commands.registry", "tracking.registry"):
        monkeypatch.delitem(sys.modules, f"seqrec.{module}", raising=False)
        monkeypatch.delattr(f"seqrec.{module}", raising=False)  # which an import from the package would take
    message = "mlflow is not installed; docs/library.md lists the extras"
    with pytest.raises(SystemExit, match=message):
        main(["registry", "show"])
    assert main(["serve", "--port", "0"]) == 1
    assert message in caplog.text


def test_verbose_shows_the_traceback(params):
    with pytest.raises(ValueError, match=r"no entry models\.flashrec"):
        main(["evaluate", "--model", "flashrec", "--verbose"])


def test_help_and_the_package_itself_import_nothing_that_takes_time():
    slow = {"torch", "mlflow", "numpy", "pyarrow", "pydantic", "yaml", "polars", "rich"}
    assert imported("--help").isdisjoint(slow)
    assert imported("leaderboard", "--help").isdisjoint({"torch", "mlflow", "pandas"})
