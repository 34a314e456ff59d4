"""All stages of one config but register, in one process, without DVC."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import yaml

from seqrec import locks
from seqrec.artifacts import write_json, write_text
from seqrec.commands.settings import check
from seqrec.config import Params, load
from seqrec.evaluation import leaderboard
from seqrec.locks import locked

logger = logging.getLogger(__name__)
SETTINGS = "params.yaml"


def run(*, config_file: Path, out: Path, data: Path | None = None, resume: bool = False) -> dict[str, float]:
    """Run every stage of a config but the last; a model whose training is complete there is not trained again.

    It registers nothing: `seqrec import` does, where MLflow is installed.

    Args:
        config_file: shaped as params.yaml, where a section or entry left out keeps its defaults.
        out: folder that receives data, artifacts, reports and resume states.
        data: folder with `sequences/` already prepared: ingest, validate and prepare are skipped.
        resume: refuse to start a training afresh.

    Returns:
        The test NDCG@10 of each model and baseline.

    Raises:
        LockedError: another process runs in `out`.
    """
    params = load(config_file)
    check(params, ingests=data is None)
    with locked(out / locks.NAME, f"--out {out}"):
        return _run(params, out, data, resume)


def _run(params: Params, out: Path, data: Path | None, resume: bool) -> dict[str, float]:
    write_text(out / SETTINGS, yaml.safe_dump(json.loads(json.dumps(params.as_dict())), sort_keys=False))
    source = data or _prepare(params, out)
    values = _baselines(params, source / "sequences", out)
    for model in params.leaderboard:
        values |= _model(params, model, source / "sequences", out, resume)
    reports = out / "reports"
    rows = leaderboard.build(reports=reports, models=params.leaderboard)
    write_json(reports / leaderboard.LEADERBOARD, {"rows": rows, "registry": None})
    leaderboard.show(reports=reports)
    logger.info("not registered: `seqrec import --run %s` does it", out)
    return values


def import_run(*, run: Path, data: Path | None = None) -> dict[str, float]:
    """Bring a finished `run` into MLflow: leaderboard, runs, candidate and champion.

    Args:
        run: the folder that `seqrec run` wrote to.
        data: the prepared data it was given, if it did not prepare its own.
    """
    from seqrec.stages.register import register

    params = load(run / SETTINGS)
    folder = data or run / "data"
    return register(
        leaderboard=params.leaderboard,
        artifacts=run / "artifacts",
        reports=run / "reports",
        sequences=folder / "sequences",
        data=folder,
        params=params.as_dict(),
        config=params.section("register"),
    )


def _prepare(params: Params, out: Path) -> Path:
    from seqrec.stages.ingest import ingest
    from seqrec.stages.prepare import prepare
    from seqrec.stages.validate import validate

    downloads, baseline = out / "state" / "downloads", Path("configs/baseline.json")
    places = {params.dataset: Path()} | {name: Path("sources") / name for name in params.sources}
    for name, place in places.items():
        data, verdict = out / "data" / place, out / "reports" / place / "validation.json"
        ingest(dataset=name, output=data, downloads=downloads, config=params.section("ingest", dataset=name))
        config = params.section("validate", dataset=name)
        validate(dataset=name, data=data, report=verdict, baseline=baseline, config=config)
        config, sequences = params.section("prepare", dataset=name), data / "sequences"
        prepare(dataset=name, data=data, validation=verdict, sequences=sequences, config=config)
    return out / "data"


def _baselines(params: Params, sequences: Path, out: Path) -> dict[str, float]:
    if importlib.util.find_spec("scipy") is None:
        logger.warning("baselines are left out: scipy is not installed")
        return {}
    from seqrec.stages.baselines import baselines

    return baselines(sequences=sequences, reports=out / "reports", config=params.section("evaluate"))


def _model(params: Params, model: str, sequences: Path, out: Path, resume: bool) -> dict[str, float]:
    from seqrec.stages.evaluate import evaluate
    from seqrec.stages.finetune import finetune
    from seqrec.stages.pretrain import pretrain

    folder, evaluation = out / "artifacts" / model, params.section("evaluate")
    shared: dict[str, Any] = {
        "model": model,
        "sequences": sequences,
        "initial": folder / "initial",
        "state": out / "state",
        "filter_seen": evaluation.filter_seen,
        "experiment": params.section("register").experiment,
    }
    pretrain(
        **shared,
        architecture=params.model(model),
        config=params.section("pretrain", model=model),
        data=sequences.parent,
        sources=[sequences.parent / "sources" / name for name in params.sources],
    )
    values = finetune(
        **shared, checkpoint=folder / "finetuned", config=params.section("finetune", model=model), resume=resume
    )
    report = out / "reports" / model
    write_json(report / "finetune.json", values)
    checkpoint = folder / "finetuned"
    metrics = evaluate(model=model, sequences=sequences, checkpoint=checkpoint, report=report, config=evaluation)
    return {f"{model}/{name}": metrics[name] for name in ("valid/ndcg@10", "test/ndcg@10", "test/recall@10")}
