"""Runs the stages in one process, without DVC."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from seqrec import locks
from seqrec.artifacts import REPORT_PAGE, SOURCE_CARD, SPLIT_CARD, VALIDATION, read_json, write_text
from seqrec.commands.settings import check, without_unfed
from seqrec.config import ConfigError, Params, load, read_changes
from seqrec.evaluation import leaderboard
from seqrec.evaluation.metrics import SELECTION, TEST
from seqrec.pipeline import BY_NAME, STAGES, Stage

logger = logging.getLogger(__name__)
SETTINGS = "params.yaml"
SHOWN = (SELECTION, TEST, "test/recall@10")  # figures of a model
OF_DATA = re.compile(r"(datasets\.[^.]+\.)?(ingest|validate|prepare)\.")  # settings of the stages that --data skips


def run(
    *,
    config_file: Path,
    out: Path,
    dataset: str = "",
    changes: str = "",
    data: Path | None = None,
    from_champion: bool = False,
    register: bool = False,
) -> dict[str, float]:
    """Run every stage; a model whose training is already complete is not trained again.

    Without --register, MLflow is not needed, and `seqrec import` registers the models later.

    Args:
        config_file: config in the form of params.yaml; missing sections and entries keep their defaults.
        out: folder that receives data, artifacts, reports and resume states.
        dataset: key in `datasets`; default: `dataset` in the config.
        changes: settings for this run alone, such as "finetune.epochs=3".
        data: folder with prepared `sequences/`; ingest, validate and prepare are then skipped, and `changes` may not
            name their settings.
        from_champion: if a model has the champion's architecture and options, and does not read text, start it from the
            champion's weights.
        register: run the stage register at the end: leaderboard, MLflow runs, candidate and champion.

    Returns:
        The test NDCG@10 of each model and baseline.

    Raises:
        ConfigError: a setting is wrong, or `out` holds a params.yaml that no run has written.
        FileNotFoundError: `data` holds no prepared data or, with --register, no source.json.
        LockedError: another process runs in `out`.
        TrackingError: --from-champion or --register, and MLflow does not answer.
    """
    params, made = load(config_file), read_changes(changes)
    if data and (vain := [name for name in made if OF_DATA.match(name)]):
        raise ConfigError(f"--changes: {vain[0]} has no effect with --data: {data} is prepared already")
    params = replace(params, dataset=dataset or params.dataset).with_overrides(made)
    check(params, ingests=data is None)
    if data and not _is_prepared(data):
        raise FileNotFoundError(f"--data: {data} holds no prepared data: name the folder `data` of a run or of DVC")
    if register and data and not (data / SOURCE_CARD).is_file():
        raise FileNotFoundError(f"--register: {data / SOURCE_CARD}, which says where the data is from, not found")
    params = params if data else without_unfed(params)
    if (out / SETTINGS).is_file() and not (out / locks.NAME).exists():
        raise ConfigError(f"--out: {out} holds a {SETTINGS} that is not of a run, which it would replace: name another")
    with locks.locked(out / locks.NAME, f"--out {out}"):
        values = _run(params, out, data, from_champion)
    if register:
        import_run(run=out, data=data)
    command = f"python -m seqrec import --run {shlex.quote(str(out))}"
    command += f" --data {shlex.quote(str(data))}" if data else ""
    later = f"not registered yet: {command} registers the models"
    leaderboard.say(out / "reports", [] if register else [later])
    return values


def _run(params: Params, out: Path, data: Path | None, from_champion: bool) -> dict[str, float]:
    reports = out / "reports"
    foreign = data is not None and data.resolve() != (out / "data").resolve()
    for name in (leaderboard.LEADERBOARD, REPORT_PAGE, *([VALIDATION] if foreign else [])):
        (reports / name).unlink(missing_ok=True)  # of an earlier run; the first marks a finished one
    write_text(out / SETTINGS, params.as_yaml())
    source = data or prepare_data(params, out)
    given: dict[str, Any] = {"data": source, "sequences": source / "sequences"}
    if from_champion:
        given["champion"] = _fetch_champion(params, out / "champion")
    values: dict[str, float] = {}
    for each, group in groupby(STAGES[:-1], key=lambda stage: stage.each):  # the last one is `import_run`
        stages = list(group)
        for item in stages[0].items(params) if each != "dataset" else ():
            figures = run_stages(stages, params, out, item, given)
            values |= {f"{item}/{name}": figures[name] for name in SHOWN} if each == "model" else figures
    leaderboard.write(reports, source / "sequences", leaderboard.build(reports=reports, models=params.leaderboard))
    return values


def run_stages(
    stages: Iterable[Stage], params: Params, out: Path, item: str, given: Mapping[str, Any]
) -> dict[str, float]:
    """Run `stages` for `item`, a dataset or a model, and return their figures; each stage takes its part of `given`."""
    figures: dict[str, float] = {}
    for stage in stages:
        figures |= stage(params, out, item, **stage.taken(given))
    return figures


def _fetch_champion(params: Params, folder: Path) -> Path:
    from seqrec.tracking.registry import fetch_champion

    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, whose champion may have had more files
    version = fetch_champion(dataset=params.dataset, folder=folder, config=params.section("register"))
    logger.info("champion to start from: %s", f"version {version}" if version else "none")
    return folder


def import_run(*, run: Path, data: Path | None = None) -> dict[str, float]:
    """Bring a finished `run` into MLflow: leaderboard, runs, candidate and champion.

    Args:
        run: the folder that `seqrec run` wrote to.
        data: folder that was passed to the run as --data, if any.
    """
    if not (run / SETTINGS).is_file():
        raise FileNotFoundError(f"--run: {run} is not the output folder of `seqrec run`")
    if not (run / "reports" / leaderboard.LEADERBOARD).is_file():
        raise FileNotFoundError(f"--run: the run in {run} was interrupted: call `seqrec run` again first")
    params = load(run / SETTINGS)
    folder = data or run / "data"
    if not _is_prepared(folder):
        raise FileNotFoundError(f"--data: {folder} holds no prepared data: name the folder that the run was given")
    figures = BY_NAME["register"](params, run, sequences=folder / "sequences", data=folder)
    outcome = read_json(run / "reports" / leaderboard.LEADERBOARD)["registry"]
    logger.info("%s is in MLflow as version %s of %s", run, outcome["version"], outcome["registered_model"])
    which = "the champion" if outcome["promoted"] else "a candidate"
    logger.info("its best model, %s, is %s: %s", outcome["model"], which, outcome["reason"])
    logger.info("`python -m seqrec ui --params %s` shows it", shlex.quote(str(run / SETTINGS)))
    return figures


def _is_prepared(data: Path) -> bool:
    """Return whether the folder `data` holds what `prepare` writes last."""
    return (data / "sequences" / SPLIT_CARD).is_file()


def prepare_data(params: Params, out: Path) -> Path:
    """Ingest, validate and prepare the dataset and the sources of `params`; return the folder of the tables."""
    for dataset in (params.dataset, *params.sources):
        given = {}
        if params.section("ingest", dataset=dataset).events:
            from seqrec.serving.events import collect

            given["events"] = out / "state/events" / f"{dataset}.parquet"
            logger.info("%s: %d new events from the event store", dataset, collect(given["events"]))
        run_stages([stage for stage in STAGES if stage.each == "dataset"], params, out, dataset, given)
    return out / "data"


def evaluate_baselines(params: Params, sequences: Path, out: Path, **limits: Any) -> dict[str, float]:
    """Compute and evaluate the baselines; `limits` are those of the stage."""
    given = {"sequences": sequences, "data": sequences.parent, **limits}
    return run_stages([BY_NAME["baselines"]], params, out, "", given)


def train_model(params: Params, model: str, sequences: Path, out: Path) -> None:
    """Build, train and evaluate a model."""
    given = {"sequences": sequences, "data": sequences.parent}
    run_stages([stage for stage in STAGES if stage.each == "model"], params, out, model, given)
