"""One training, from its inputs to its output folder: skipped if already done, resumed, fitted and saved.

The training loop itself is in loop.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from seqrec.artifacts import HISTORY, MODEL_CARD, SPLIT_CARD, TOKENS, WEIGHTS, read_json, replaced, write_text
from seqrec.config import EXPERIMENT, ConfigError, FinetuneConfig, RegisterConfig, TrainConfig
from seqrec.counts import search
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.models.base import SequenceModel
from seqrec.training import batches, cards, loop
from seqrec.training.checkpoint import ResumeState, fingerprint, load_counts, load_model, save_counts, save_model
from seqrec.training.progress import LogEpoch
from seqrec.training.validation import ACCURACY, METRIC

logger = logging.getLogger(__name__)
History = Sequence[Mapping[str, Any]]  # a record per epoch


@dataclass(frozen=True, kw_only=True)
class Job:
    """How and where a model is trained."""

    name: str  # key in `models`
    stage: str
    config: TrainConfig  # the stage's section of params.yaml
    inputs: Sequence[Path]  # folders that the result depends on
    output: Path  # folder that receives weights, card and history
    state: Path  # folder of resume states
    filter_seen: bool  # whether validation leaves out seen items
    resume: bool = False  # fail instead of starting afresh
    experiment: str = EXPERIMENT  # name of the MLflow experiment
    log: LogEpoch | None = None  # used instead of MLflow; an exception it raises ends the training but keeps the state
    epochs: Mapping[str, int] | None = None  # see `loop.Fit`
    finish: Callable[[], None] | None = None  # called once the model is trained, before it is saved
    content: Sequence[str] = ()  # anything else that the result depends on
    files: Mapping[str, bytes] = field(default_factory=dict)  # files saved with the model, see `save_model`
    facts: Mapping[str, Any] = field(default_factory=dict)  # further entries of the model card
    earlier_seconds: float = 0.0  # spent on the initial weights; the card adds them to the training time


def train(model: SequenceModel, data: Sequences, job: Job) -> dict[str, float]:
    """Run the phases of the job's stage, write weights, card and history, and return the figures of the run.

    The output folder is replaced as a whole, in one step.

    Raises:
        ConfigError: `resume` is set, but no saved state matches.
    """
    identity = _identity(model, job)
    state = ResumeState(job.state, identity)
    if (finished := _finished(job.output, identity)) is not None:
        logger.info("%s of %s: %s already holds the result of exactly this training", job.stage, job.name, job.output)
        state.delete()
        return finished
    if job.resume and state.load() is None:
        raise ConfigError(
            f"--resume: no state in {job.state} belongs to this {job.stage} of {job.name} (config, data or code differ)"
        )
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    history: History = []
    if model.phases(job.stage):
        loop.keep_freed_memory()
        with nullcontext(job.log) if job.log else live_log(job, identity) as log:
            history = loop.fit(
                loop.Fit(
                    model=model,
                    data=data,
                    stage=job.stage,
                    config=job.config,
                    filter_seen=job.filter_seen,
                    state=state,
                    accelerator=accelerator,
                    log=log,
                    epochs=job.epochs,
                )
            )
        forget_users(model, ~batches.trained_users(data, job.config))
    if job.finish is not None:
        job.finish()
    if accelerator.is_main_process:
        _write(model, data, job, identity, history)
        state.delete()
    return _figures(history)


def _identity(model: SequenceModel, job: Job) -> str:
    """Return the hash of everything that the job's result depends on."""
    read = (SPLIT_CARD, WEIGHTS, TOKENS)
    hashed = [folder / file for folder in job.inputs for file in read if (folder / file).exists()]
    belongings = [f"{name} {hashlib.sha256(file).hexdigest()}" for name, file in job.files.items()]
    # different options can give the same initial weights (dropout has none), so the options are hashed as well
    named = (job.name, type(model).__name__, model.options, job.filter_seen, job.config)
    content = (*named, *job.content, *belongings)
    return fingerprint(f"seqrec.stages.{job.stage}", type(model).__module__, content, *hashed)


def _write(model: SequenceModel, data: Sequences, job: Job, identity: str, history: History) -> None:
    """Write the trained model, its card, counts and history as the job's new output folder."""
    card = {
        "model": job.name,
        "stage": job.stage,
        "fingerprint": identity,
        "config": asdict(job.config),
        "seconds": job.earlier_seconds + _figures(history)["seconds"],
        "filter_seen": job.filter_seen,
        "median_gap": sequences.median_gap(data),
        "split": cards.split_of(data.card),
        "peak_bytes": loop.peak_memory(next(model.parameters()).device),
        **job.facts,
    }
    lines = "".join(json.dumps(record) + "\n" for record in history)
    card["history_sha256"] = hashlib.sha256(lines.encode()).hexdigest()
    with replaced(job.output) as folder:
        if isinstance(job.config, FinetuneConfig) and job.config.counts != "none":
            term, chosen = search.for_model(model, data, job.config, filter_seen=job.filter_seen)
            card["counts"] = save_counts(folder, term, chosen)
        save_model(folder, model, card, job.files)
        write_text(folder / HISTORY, lines)


@torch.no_grad()
def forget_users(model: SequenceModel, unknown_U: Tensor) -> None:
    """Give every user without a training window the vector of user 0, the unknown user.

    The saved weights thereby say who is known: whoever reads them may pass any user's number on.
    """
    for table in user_tables(model):
        table.weight[1:][unknown_U.to(table.weight.device)] = table.weight[0]


def user_tables(model: SequenceModel) -> list[nn.Embedding]:
    """Return the embedding tables named `users`; row u is user u, and row 0 the unknown user."""
    named = ((name.rpartition(".")[2], part) for name, part in model.named_modules())
    return [part for name, part in named if name == "users" and isinstance(part, nn.Embedding)]


def _figures(history: History) -> dict[str, float]:
    values = {"epochs": len(history), "seconds": sum(record["seconds"] for record in history)}
    for name in (METRIC, ACCURACY):
        best = [record[name] for record in history if name in record]
        values |= {name: max(best)} if best else {}
    return values


def _finished(output: Path, identity: str) -> dict[str, float] | None:
    """Return the figures of `output` if it holds the intact result of the training `identity`."""
    if not (output / MODEL_CARD).exists():
        return None
    try:
        card = read_json(output / MODEL_CARD)
        if card.get("fingerprint") != identity:
            return None
        load_model(output)  # verifies the files
        load_counts(output, card)
        return _figures(cards.history(output, card))
    except ValueError as error:
        logger.warning("the training is repeated: %s", error)
        return None


@contextmanager
def live_log(job: Job, identity: str) -> Iterator[LogEpoch | None]:
    """Log each epoch to MLflow as it ends if MLFLOW_TRACKING_URI is set; otherwise the stage `register` logs them."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        yield None
        return
    from seqrec.tracking.runs import live_run

    with live_run(identity, f"{job.name} {job.stage}", RegisterConfig(experiment=job.experiment)) as log:
        yield log
