"""Hyper-parameter search with Optuna: on the validation split only, seeded, and resumable at any moment.

A study is one SQLite file. The values of a trial depend only on the study's seed and on the earlier trials, and a
killed trial continues from its resume state, so an interrupted search ends with the same result as any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from seqrec.artifacts import SPLIT_CARD, inputs_of, read_json, rename, write_json, write_text
from seqrec.commands.settings import model_of
from seqrec.config import SECTIONS, ConfigError, Params, SearchRange, TuneConfig, from_dict
from seqrec.errors import RetryableError
from seqrec.evaluation.metrics import SELECTION
from seqrec.locks import locked
from seqrec.models import REGISTRY
from seqrec.pipeline import STAGES
from seqrec.stages.finetune import finetune
from seqrec.stages.pretrain import pretrain
from seqrec.tracking import runs
from seqrec.training.progress import LogEpoch
from seqrec.training.resume import fingerprint

logger = logging.getLogger(__name__)
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
SECONDS, FAILURE = "seconds", "failure"  # attributes of a trial: its time so far, and why it has no result
DATA_STAGES = [stage.name for stage in STAGES if stage.each == "dataset"]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Search:
    """A search: the settings of one model on one dataset, in the form of params.yaml, and their ranges."""

    model: str
    content: Mapping[str, Any]
    space: Mapping[str, SearchRange]
    config: TuneConfig
    split: str

    def params(self, values: Values) -> Params:
        """Return all settings of a trial with `values`."""
        return from_dict(self.content).with_overrides({f"models.{self.model}.{key}": values[key] for key in values})

    def options(self, params: Params) -> dict[str, Any]:
        """Return every option of the model, including defaults; options that are `auto` stay `auto`."""
        return asdict(model_of(params, self.model)[1]) | params.model(self.model).options

    def check(self) -> None:
        """Check that the ends of each range, and a value in between, are valid together with the other settings.

        Raises:
            ConfigError: one is not; the message names the key.
        """
        self.options(self.params({}))
        for key, span in self.space.items():
            found = _distribution(span)
            between = []
            if isinstance(found, FloatDistribution):  # both ends may be whole numbers, and the setting allow no others
                between = [min(found.high, found.low + (found.step or (found.high - found.low) / 3.1))]
            for value in span.choices or (span.low, span.high, *between):
                try:
                    self.options(self.params({key: value}))
                except ConfigError as error:
                    raise ConfigError(
                        f"tune.spaces.{self.model}.{key}: {value!r} contradicts the other settings ({error})"
                    ) from error


def tune(
    *,
    model: str,
    dataset: str,
    params: Mapping[str, Any],
    sequences: Path = Path("data/sequences"),
    output: Path | None = None,
    state: Path = Path("state"),
    study: Path | None = None,
) -> dict[str, Any]:
    """Search the settings of `model` in the ranges of `tune.spaces`, and write the best ones as a config for `run`.

    Only the validation split is used. Repeating the call continues a search that was killed; with more `tune.trials`,
    it extends a finished one.

    Args:
        model: key in `models`.
        dataset: key in `datasets`.
        params: all settings, in the form of params.yaml.
        sequences: folder of the prepared dataset; items.parquet and the sources lie beside it.
        output: config to write (default: configs/tuned/MODEL.yaml); the budget is written beside it as JSON.
        state: folder of studies and resume states.
        study: SQLite file of the study, by default state/tune/FINGERPRINT.db.

    Returns:
        The budget spent on the model, and its best validation metric.

    Raises:
        ConfigError: a range is wrong, the data was prepared with other settings, the study belongs to another search,
            or no trial has a result.
    """
    if output and output.suffix == ".json":
        raise ConfigError(f"--output: {output} is where the budget goes; name the config otherwise, such as .yaml")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a search runs in one process: call tune without torchrun")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = _search(model, dataset, params, sequences)
    architecture = REGISTRY.module(search.params({}).model(model).architecture)
    files = inputs_of(sequences, search.params({}).sources)
    identity = fingerprint(__name__, architecture, _deciding(search), *files)
    path = (study or state / "tune" / f"{identity}.db").absolute()
    work = path.with_name(f"{path.name}.work")
    with locked(path.with_name(f"{path.name}.lock"), f"--study {path}"):
        found = _open(path, identity, search.config)
        tracker = _Tracker(search, identity)
        while (number := len(found.get_trials(deepcopy=False, states=FINISHED))) < search.config.trials:
            trial = _next(found, search, number)
            _run(search, found, trial, sequences, work)
            tracker.write(found)
        shutil.rmtree(work, ignore_errors=True)
        budget = _budget(found, search)
        _write(output or Path("configs") / "tuned" / f"{model}.yaml", search, found, budget)
        tracker.write(found, budget)
    return budget


def _search(model: str, dataset: str, params: Mapping[str, Any], sequences: Path) -> Search:
    """Return the search of `model`, without the settings of other models and datasets."""
    everything = from_dict({**params, "dataset": dataset})
    space, config = everything.space(model), everything.section("tune")
    if config.epochs:
        everything = everything.with_overrides({f"models.{model}.finetune.epochs": config.epochs})
    kept = (dataset, *everything.sources)
    content = everything.as_dict() | {
        "leaderboard": [model],
        "datasets": {name: everything.dataset_entry(name) for name in kept},
        "models": {model: everything.model_entry(model)},
        "tune": {},
    }
    card = read_json(sequences / SPLIT_CARD)
    if (held := card["dataset"]) != dataset:
        raise ConfigError(f"--dataset: {sequences} holds {held}, not {dataset}: add --dataset {held}")
    made = card | {f"min_{name}_events": number for name, number in card["k_core"].items()}
    for name, value in asdict(everything.section("prepare", dataset=dataset)).items():
        if name != "seed" and (there := made.get(name, value)) != value:  # the seed decides nothing in most splits
            raise ConfigError(
                f"prepare.{name}: is {value}, but {sequences} was prepared with {there}: prepare the data again, or "
                "pass the settings of the data as --params"
            )
    search = Search(model=model, content=content, space=space, config=config, split=card["split_sha256"])
    search.check()
    return search


def _deciding(search: Search) -> tuple[Any, ...]:
    """Return everything that decides the values and results of trials; the number of trials does not."""
    params, config = search.params({}), search.config
    stages = [params.section(stage, model=search.model) for stage in ("pretrain", "finetune")]
    rules = (config.seed, config.startup_trials, config.warmup_epochs)
    seen = params.filters_seen()
    return search.model, params.model(search.model), params.sources, stages, seen, rules, list(search.space.items())


def _open(path: Path, identity: str, config: TuneConfig) -> optuna.Study:
    """Return the study in `path`; create it if there is none, with one rename once it is complete."""
    if {"%", "?"}.intersection(str(path)):
        raise ConfigError(f"--study: {path} has % or ? in its name, which Optuna cannot read")
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)
        storage = optuna.storages.RDBStorage(f"sqlite:///{partial}")
        optuna.create_study(storage=storage, study_name="tune", direction="maximize").set_user_attr("search", identity)
        storage.remove_session()
        storage.engine.dispose()
        rename(partial, path)
    _check_study(path)
    first = config.warmup_epochs + 1  # epochs count from 1
    pruner = optuna.pruners.MedianPruner(n_startup_trials=config.startup_trials, n_warmup_steps=first)
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{path}", pruner=pruner)
    if study.user_attrs["search"] != identity:
        raise ConfigError(f"--study: {path} belongs to another search (settings, ranges, data or code differ)")
    logger.info("study %s: %d trials so far", path, len(study.get_trials(deepcopy=False, states=FINISHED)))
    return study


def _check_study(path: Path) -> None:
    """Raise ConfigError if the database of a study is damaged."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            known = database.execute("SELECT count(*) FROM studies").fetchone()[0]
    except sqlite3.Error as error:
        verdict, known = str(error), 0
    if verdict != "ok" or not known:
        reason = "it holds no study" if verdict == "ok" else verdict
        raise ConfigError(f"--study: {path} is damaged ({reason}): remove it, and the search starts again")


def _next(study: optuna.Study, search: Search, number: int) -> Trial:
    """Return the unfinished trial of a killed process, or a new one with values from the seed and earlier trials."""
    space = {key: _distribution(span) for key, span in search.space.items()}
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if left.params.keys() == space.keys():
            logger.info("continuing trial %d: %s", left.number, _text(left.params))
            return Trial(study, left._trial_id)
        study.tell(left.number, state=TrialState.FAIL)  # killed while its values were drawn; they are drawn again
    seed = int(np.random.SeedSequence((search.config.seed, number)).generate_state(1)[0])
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=search.config.startup_trials)
    trial = study.ask(space)
    logger.info("trial %d: %s", trial.number, _text(trial.params))
    return trial


def _distribution(span: SearchRange) -> BaseDistribution:
    if span.choices is not None:
        return CategoricalDistribution(span.choices)
    low, high, step = span.low, span.high, span.step
    assert low is not None
    assert high is not None
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int | None):
        return IntDistribution(low, high, log=span.log, step=step or 1)
    return FloatDistribution(low, high, log=span.log, step=step)


def _run(search: Search, study: optuna.Study, trial: Trial, sequences: Path, work: Path) -> None:
    """Train one trial and record it in the study; only then delete its files."""
    folder = work / f"trial-{trial.number}"
    left = study.get_trials(deepcopy=False)[trial.number]
    began = time.monotonic() - left.user_attrs.get(SECONDS, 0.0)

    def log(record: dict[str, Any], number: int) -> None:
        trial.set_user_attr(SECONDS, time.monotonic() - began)
        if SELECTION not in record:
            return
        if number not in left.intermediate_values:  # otherwise killed between this report and saving the state
            trial.report(record[SELECTION], number)
        if trial.should_prune():
            raise optuna.TrialPruned

    value, outcome = None, TrialState.PRUNED
    try:
        value, outcome = _train(search, trial.params, sequences, work, folder, log), TrialState.COMPLETE
    except optuna.TrialPruned:
        pass
    except RetryableError:  # none of the values; the trial continues later
        raise
    except (ValueError, FloatingPointError, MemoryError, RuntimeError) as error:  # a diverging loss, too large batches
        logger.warning("trial %d has no result: %s", trial.number, error)
        trial.set_user_attr(FAILURE, str(error) or type(error).__name__)
    trial.set_user_attr(SECONDS, time.monotonic() - began)
    study.tell(trial, value, state=outcome)
    shutil.rmtree(folder, ignore_errors=True)
    ended = study.get_trials(deepcopy=False)[trial.number]
    score = f"{SELECTION} {value:.4f}" if value is not None else f"after {ended.last_step or 0} epochs"
    logger.info("trial %d %s, %s", trial.number, outcome.name.lower(), score)


def _train(search: Search, values: Values, sequences: Path, work: Path, folder: Path, log: LogEpoch) -> float:
    """Return the best validation metric of a training with `values`; trials with equal initial weights share them."""
    params = search.params(values)
    architecture = params.model(search.model)
    config, first = (params.section(stage, model=search.model) for stage in ("finetune", "pretrain"))
    config = replace(config, counts="none")  # a trial is judged by the model alone
    digest = hashlib.sha256(repr((architecture, first)).encode()).hexdigest()[:16]
    initial = work / f"initial-{digest}"
    for other in set(work.glob("initial-*")) - {initial}:
        shutil.rmtree(other)
    shared: dict[str, Any] = {
        "model": search.model,
        "sequences": sequences,
        "initial": initial,
        "filter_seen": params.filters_seen(),
        "experiment": params.section("register").experiment,
    }
    tables: dict[str, Any] = {"data": sequences.parent, "sources": params.sources}
    pretrain(**shared, **tables, state=work / "state", architecture=architecture, config=first)
    figures = finetune(**shared, state=folder / "state", checkpoint=folder / "finetuned", config=config, log=log)
    return figures[SELECTION]


def _budget(study: optuna.Study, search: Search) -> dict[str, Any]:
    """Return the cost and the result of the search."""
    finished = study.get_trials(deepcopy=False, states=FINISHED)
    complete = [trial for trial in finished if trial.state == TrialState.COMPLETE]
    failed = [trial for trial in finished if FAILURE in trial.user_attrs]
    if not complete:
        reason = f"the last one failed: {failed[-1].user_attrs[FAILURE]}" if failed else "all were pruned"
        raise ConfigError(f"tune.spaces.{search.model}: no trial has a result; {reason}")
    best = study.best_trial
    budget = {
        "trials": len(finished),
        "complete": len(complete),
        "pruned": len(finished) - len(complete) - len(failed),
        "failed": len(failed),
        "epochs": sum(trial.last_step or 0 for trial in finished),
        "seconds": round(sum(trial.user_attrs[SECONDS] for trial in finished), 1),
        "seed": search.config.seed,
        "best_trial": best.number,
        SELECTION: best.value,
        "split_sha256": search.split,
    }
    logger.info("%s: %s", search.model, _summary(budget))
    logger.info("trial %d is the best: %s %.4f with %s", best.number, SELECTION, best.value, _text(best.params))
    return budget


def _summary(budget: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{budget[name]} {name}" for name in ("complete", "pruned", "failed"))
    return f"{budget['trials']} trials ({counts}), {budget['epochs']} epochs, {budget['seconds']:.0f} s"


def _write(output: Path, search: Search, study: optuna.Study, budget: dict[str, Any]) -> None:
    """Write the best settings as a complete config for `seqrec run`, and the budget beside it."""
    params = search.params(study.best_params)
    stages = [stage for stage in SECTIONS if stage not in ("serve", "tune")]
    content: dict[str, Any] = {"dataset": params.dataset, "sources": params.sources, "leaderboard": [search.model]}
    content |= {stage: asdict(params.section(stage, model=search.model)) for stage in stages}
    content["filter_seen"] = params.filters_seen()
    content["datasets"] = {name: params.dataset_entry(name) for name in params.sources}
    if params.sources:  # for which the settings of the dataset itself must not hold
        content["datasets"][params.dataset] = {stage: content[stage] for stage in DATA_STAGES}
        content |= {stage: dict(params.sections[stage]) for stage in DATA_STAGES}
    entry = {"architecture": params.model(search.model).architecture, "options": search.options(params)}
    content["models"] = {search.model: entry}
    header = [
        f"{search.model} on {params.dataset}: the best of a search on validation.",
        f"budget: {_summary(budget)}; study seed {budget['seed']}",
        f"best:   trial {budget['best_trial']}, {SELECTION} {budget[SELECTION]:.6f}; split {search.split}",
        *(f"range:  {key} {_span(span)} -> {study.best_params[key]}" for key, span in search.space.items()),
        f"  python -m seqrec run --config-file {output} --out runs/{output.stem}",
    ]
    plain = json.loads(json.dumps(content))  # tuples become lists
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=120)
    write_json(output.with_suffix(".json"), {"model": search.model, "dataset": params.dataset, **budget})
    write_text(output, "".join(f"# {line}\n" for line in header) + text)
    logger.info("written to %s", output)


def _span(span: SearchRange) -> str:
    if span.choices is not None:
        return f"of {span.choices}"
    return f"{span.low} to {span.high}{' log' if span.log else ''}{f' step {span.step}' if span.step else ''}"


def _text(values: Values) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


class _Tracker:
    """Mirrors a study in MLflow, as a parent run with a child run per trial. The search does not depend on it."""

    def __init__(self, search: Search, identity: str) -> None:
        self.search, self.identity = search, identity
        self.config = search.params({}).section("register")
        self.silent = False
        self.written: set[int] = set()

    def write(self, study: optuna.Study, budget: Mapping[str, Any] | None = None) -> None:
        """Log the trials that are not in MLflow yet; given the `budget`, end the parent run."""
        if self.silent and budget is None:
            return
        try:
            self._write(study, budget)
        except Exception as error:  # no failure here may stop the search
            self.silent = True
            logger.warning(
                "the trials are not in MLflow (%s); run the same command again to upload what is missing",
                runs.first_line(error),
            )

    def _write(self, study: optuna.Study, budget: Mapping[str, Any] | None) -> None:
        client = runs.connect(self.config)
        experiment = runs.experiment(client, self.config)
        name, search = f"tune {self.search.model}", self.search
        parent = runs.open_run(client, experiment, self.identity, name, parent=runs.injected_run())
        spans = {key: _span(span) for key, span in search.space.items()}
        facts = {"model": search.model, "dataset": search.content["dataset"], "split_sha256": search.split}
        runs.log_params(client, parent, {**facts, "seed": search.config.seed, "range": spans})
        for trial in study.get_trials(deepcopy=False, states=FINISHED):
            if trial.number not in self.written:
                self._write_trial(client, experiment, parent.info.run_id, trial)
                self.written.add(trial.number)
        if budget is None:
            client.update_run(parent.info.run_id, status="RUNNING")
        else:
            numbers = {key: value for key, value in budget.items() if isinstance(value, int | float)}
            runs.log_metrics(client, parent, numbers)
            client.set_terminated(parent.info.run_id)

    def _write_trial(self, client: Any, experiment: str, parent: str, trial: FrozenTrial) -> None:
        assert trial.datetime_start is not None
        assert trial.datetime_complete is not None
        began, ended = trial.datetime_start.timestamp(), trial.datetime_complete.timestamp()
        name, mark = f"{self.search.model} trial {trial.number}", f"{self.identity}-{trial.number}"
        run = runs.open_run(client, experiment, mark, name, parent=parent, seconds=time.time() - began)
        if run.info.end_time:
            return
        runs.log_params(client, run, trial.params)
        scores = trial.intermediate_values
        points = [({SELECTION: score}, epoch, ended) for epoch, score in scores.items()]
        client.log_batch(run.info.run_id, metrics=runs.curves(client, run, points))
        figures = {"epochs": trial.last_step or 0, "seconds": trial.user_attrs[SECONDS]}
        runs.log_metrics(client, run, figures | ({SELECTION: max(scores.values())} if scores else {}))
        outcome = "failed" if FAILURE in trial.user_attrs else trial.state.name.lower()
        client.set_tag(run.info.run_id, "seqrec.trial", outcome)
        status = "FINISHED" if outcome == "complete" else "KILLED"
        client.set_terminated(run.info.run_id, status=status, end_time=int(1000 * ended))
