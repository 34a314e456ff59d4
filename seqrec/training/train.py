"""One training, from its inputs to its output folder: skipped if already done, resumed, fitted and saved.

The training loop itself is in loop.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from seqrec.artifacts import EPOCH_RECORDS, MODEL_CARD, SPLIT_CARD, TOKENS, WEIGHTS, replaced, write_text
from seqrec.config import FinetuneConfig, TrainConfig
from seqrec.counts import search
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation.metrics import SELECTION
from seqrec.models.base import SequenceModel
from seqrec.training import batches, cost, loop
from seqrec.training.auto_settings import has_fast_bf16
from seqrec.training.checkpoint import load_checkpoint, save_counts, save_model
from seqrec.training.held_out import split_of
from seqrec.training.progress import OpenLog, unlogged
from seqrec.training.resume import ResumeState, fingerprint
from seqrec.training.validation import ACCURACY

logger = logging.getLogger(__name__)
Records = Sequence[Mapping[str, Any]]  # a record per epoch


@dataclass(frozen=True, kw_only=True)
class Training:
    """How and where a model is trained."""

    name: str  # key in `models`
    stage: str
    config: TrainConfig  # the stage's section of params.yaml
    inputs: Sequence[Path]  # folders that the result depends on
    output: Path  # folder that receives weights, card and history
    state: Path  # folder of resume states
    filter_seen: bool  # whether validation leaves out seen items
    open_log: OpenLog = unlogged  # an exception that the log raises ends the training but keeps the state
    epochs: Mapping[str, int] | None = None  # see `loop.fit`
    finish: Callable[[], None] | None = None  # called once the model is trained, before it is saved
    content: Sequence[str] = ()  # anything else that the result depends on
    files: Mapping[str, bytes] = field(default_factory=dict)  # files saved with the model, see `save_model`
    facts: Mapping[str, Any] = field(default_factory=dict)  # further entries of the model card
    earlier_seconds: float = 0.0  # spent on the initial weights; the card adds them to the training time


def train(model: SequenceModel, data: Sequences, training: Training) -> dict[str, float]:
    """Run the phases of the training's stage, write weights, card and records, and return the figures of the run.

    The output folder is replaced as a whole, in one step.
    """
    identity = _identity(model, training)
    state, title = ResumeState(training.state, identity), f"{training.stage} of {training.name}"
    if (finished := _finished(training.output, identity)) is not None:
        if model.phases(training.stage):  # otherwise there was nothing to train
            logger.info("%s is already complete in %s and is not repeated", title, training.output)
        state.delete()
        return finished
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    records: Records = []
    if model.phases(training.stage):
        if training.config.precision == "bf16" and accelerator.device.type == "cpu" and not has_fast_bf16():
            logger.warning(
                "%s.precision: bf16 is emulated on this CPU, at about half the speed of fp32: set fp32 or auto",
                training.stage,
            )
        if training.config.exclude_past and not training.filter_seen:
            logger.warning(
                "%s.exclude_past: true trains without past items, which filter_seen: false ranks: set it to false",
                training.stage,
            )
        for part in model.parts:
            part.on_start(batches.trained_counts(data, training.config))
        cost.keep_freed_memory()
        title = f"{training.name} {training.stage}"
        with training.open_log(identity, title) as log:
            records = loop.fit(
                model,
                data,
                stage=training.stage,
                config=training.config,
                filter_seen=training.filter_seen,
                state=state,
                accelerator=accelerator,
                log=log,
                epochs=training.epochs,
                title=title,
            )
        forget_users(model, ~batches.trained_users(data, training.config))
    if training.finish is not None:
        training.finish()
    if accelerator.is_main_process:
        _write(model, data, training, identity, records)
        state.delete()
    return _figures(records)


def _identity(model: SequenceModel, training: Training) -> str:
    """Return the hash of everything that the training's result depends on."""
    read = (SPLIT_CARD, WEIGHTS, TOKENS)
    hashed = [folder / file for folder in training.inputs for file in read if (folder / file).exists()]
    belongings = [f"{name} {hashlib.sha256(file).hexdigest()}" for name, file in training.files.items()]
    # different options can give the same initial weights (dropout has none), so the options are hashed as well
    named = (training.name, model.architecture.__name__, model.options, training.filter_seen, training.config)
    content = (*named, *training.content, *belongings)
    return fingerprint(f"seqrec.stages.{training.stage}", model.architecture.__module__, content, *hashed)


def _write(model: SequenceModel, data: Sequences, training: Training, identity: str, records: Records) -> None:
    """Write the trained model, its card, counts and epochs as the training's new output folder."""
    card = {
        "model": training.name,
        "stage": training.stage,
        "fingerprint": identity,
        "config": asdict(training.config),
        "seconds": training.earlier_seconds + _figures(records)["seconds"],
        "filter_seen": training.filter_seen,
        "median_gap": sequences.median_gap(data),
        "split": split_of(data.card),
        "peak_bytes": cost.peak_memory(next(model.parameters()).device),
        **training.facts,
    }
    lines = "".join(json.dumps(record) + "\n" for record in records)
    card["history_sha256"] = hashlib.sha256(lines.encode()).hexdigest()
    with replaced(training.output) as folder:
        if isinstance(training.config, FinetuneConfig) and training.config.counts != "none":
            term, chosen = search.for_model(model, data, training.config, filter_seen=training.filter_seen)
            card["counts"] = save_counts(folder, term, chosen)
        save_model(folder, model, card, training.files)
        write_text(folder / EPOCH_RECORDS, lines)


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


def _figures(records: Records) -> dict[str, float]:
    values = {"epochs": len(records), "seconds": sum(record["seconds"] for record in records)}
    for name in (SELECTION, ACCURACY):
        best = [record[name] for record in records if name in record]
        values |= {name: max(best)} if best else {}
    return values


def _finished(output: Path, identity: str) -> dict[str, float] | None:
    """Return the figures of `output` if it holds the intact result of the training `identity`."""
    if not (output / MODEL_CARD).exists():
        return None
    try:
        checkpoint = load_checkpoint(output)
        return _figures(checkpoint.epoch_records()) if checkpoint.card["fingerprint"] == identity else None
    except ValueError as error:
        logger.warning("the training is repeated, because its result cannot be used: %s", error)
        return None
