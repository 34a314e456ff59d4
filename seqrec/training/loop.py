"""The training loop that every model shares: phases, epochs, steps, validation, early stopping, exact resume.

The data is on the device, or in a mapped file with `resident: false`, and a batch is a few gathers. A step waits for
the device only to report.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from seqrec.config import TrainConfig
from seqrec.data.sequences import Sequences
from seqrec.models.base import SequenceModel
from seqrec.training import contrast, cost, resume, validation
from seqrec.training.batches import trained_counts
from seqrec.training.examples import Examples
from seqrec.training.optimizer import learning_rate
from seqrec.training.progress import EpochMeter, LogEpoch, Position, ProgressBar, report_epoch
from seqrec.training.resume import ResumeState
from seqrec.training.step import Divergence, TrainingStep
from seqrec.training.utilisation import Utilisation
from seqrec.training.validation import EarlyStopping

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)
REPORT_STEPS = 50  # on an accelerator, steps between two readings of the loss
MEMORY_STEPS = 10  # steps between two returns of freed memory


def fit(
    model: SequenceModel,
    data: Sequences,
    *,
    stage: str,
    config: TrainConfig,
    filter_seen: bool,
    state: ResumeState,
    accelerator: Accelerator,
    log: LogEpoch | None = None,
    epochs: Mapping[str, int] | None = None,
    title: str = "",
) -> list[dict[str, Any]]:
    """Train the model in place, phase by phase, and leave it with the weights that were best on validation.

    Resumes from the saved state if there is one. On a CPU, the result equals that of an uninterrupted run bit for bit.

    With `epochs`, each phase runs for exactly that many epochs, without validation. The learning rates are still those
    of a schedule over `config.epochs`. `filter_seen` says whether validation leaves out seen items. Lines of progress
    start with `title`, by default the stage.

    Returns:
        One record per epoch: losses, validation metrics, learning rate, seconds, targets per second.

    Raises:
        FloatingPointError: loss, gradients or weights are not finite; the message names the settings to try.
        OSError: a resume state cannot be written.
        ValueError: there are no training or no validation cases.
    """
    title = title or stage
    contrast.check(config, model, stage)
    if epochs is None and bool((data.valid_stop == data.valid_start).all()):
        raise ValueError(
            "early stopping has no validation cases: check prepare.protocol, prepare.valid_share, prepare.sample_users "
            "and the k-core"
        )
    torch.manual_seed(config.seed + accelerator.process_index)
    device, main = accelerator.device, accelerator.is_main_process
    model, data = model.to(device), data.to(device, resident=config.resident)
    position, meter, utilisation = Position(), EpochMeter(device), Utilisation(device, config.precision)
    examples, divergence = Examples(data, config, accelerator), Divergence(model, stage)
    saved = state.load()
    if saved is not None:
        resume.restore({"position": position}, saved)

    for phase in model.phases(stage)[position.phase :]:
        model.enter(phase)
        step = TrainingStep(model, trained_counts(data, config), config, accelerator)
        stopping = EarlyStopping(model, phase, config.patience)
        validate = partial(
            validation.of_phase, model, data, phase, config, filter_seen=filter_seen, accelerator=accelerator
        )
        components: dict[str, Stateful] = {
            "position": position,
            "model": model,
            "optimizers": step.optimizers,
            "stopping": stopping,
            "examples": examples,
            "meter": meter,
            "random": resume.RandomState(accelerator),
        }
        if saved is not None:
            logger.info("resuming %s at epoch %d, batch %d", title, position.epoch + 1, position.batch)
            resume.restore(components, saved)
            saved = None
        elif position.phase > 0 and epochs is None:  # a later phase must beat the weights it starts from
            stopping.update(validate())

        last = config.epochs if epochs is None else epochs.get(phase, 0)
        with ProgressBar(f"{title} {phase}", last, shown=main) as bar:
            while position.epoch < last and not stopping.over:
                if position.batch == 0:  # otherwise done before the interruption
                    model.eval()
                    with torch.no_grad():
                        model.on_epoch()
                model.train()
                meter.start()
                batches = examples.draw(model, phase)
                total = config.epochs * batches
                bar.update(bar.steps, total=last * batches, completed=position.step)

                for example in examples.build(position.batch, position.total_steps):
                    step.optimizers.rate = learning_rate(position.step, total, config)
                    with utilisation.around(position.total_steps, example.number):
                        loss, terms, norm = step(example)
                    position.advance()
                    meter.add(loss, terms, example.number * accelerator.num_processes)
                    divergence.watch(position.step, loss, norm)
                    if device.type == "cpu" or position.step % REPORT_STEPS == 0:  # this waits for the device
                        divergence.check(position.step)
                        bar.show(position, meter, stopping)
                    if position.total_steps % MEMORY_STEPS == 0:
                        cost.return_freed_memory()
                    if position.total_steps == cost.FIRST_STEPS <= position.batch and main:
                        utilisation.wanted = cost.announce(title, last, last * batches, meter)
                    if position.step % config.save_steps == 0 and position.batch < batches:
                        divergence.check_weights(position.step)
                        resume.save(state, position.total_steps, components, accelerator)

                divergence.check_weights(position.step)
                seconds = meter.seconds
                record = {
                    "phase": phase,
                    "epoch": position.epoch + 1,
                    "step": position.step,
                    **meter.means(position.batch, accelerator),
                    "learning_rate": step.optimizers.rate,
                    "seconds": meter.before + seconds,
                    "targets_per_second": meter.targets_per_second(seconds),
                }
                position.end_epoch()
                examples.end_epoch()
                meter.clear()
                if epochs is None and (position.epoch % config.eval_every == 0 or position.epoch == config.epochs):
                    record |= (values := validate())
                    stopping.update(values)
                position.records.append(record)
                if main:
                    if log is not None:
                        log(record, len(position.records))
                    report_epoch(title, record, last)
                resume.save(state, position.total_steps, components, accelerator)

        model.train().eval()  # a resumed one is in eval mode already, and some models prepare for it
        stopping.restore_best()
        position.end_phase()
    if position.records:
        utilisation.report(title, max(record["targets_per_second"] for record in position.records))
    return position.records
