"""The training loop that every model shares: steps, phases, early stopping, exact resume.

All data is on the device, and a batch is a few gathers. A step waits for the device only to report.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from seqrec.config import TrainConfig
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.models.base import Options, SequenceModel
from seqrec.models.optional import SelfSupervised
from seqrec.training import batches, contrast, objectives, optimizer, validation
from seqrec.training.batches import Windows
from seqrec.training.checkpoint import ResumeState, below, not_finite
from seqrec.training.objectives import Example, Loss
from seqrec.training.optimizer import clip_gradients
from seqrec.training.prefetch import ahead
from seqrec.training.progress import FIGURE, EpochMeter, LogEpoch, ProgressBar, report_epoch
from seqrec.training.validation import ACCURACY, METRIC

logger = logging.getLogger(__name__)
REPORT_STEPS = 50  # on an accelerator, steps between two readings of the loss
FIRST_STEPS = 10  # steps from which the duration of the whole training is estimated
LONG_S = 60.0  # the estimate is logged for trainings longer than this
PROBE_CASES = 512  # validation cases ranked to estimate the duration of a whole validation


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What is trained, on what, and how.

    With `epochs`, each phase runs for exactly that many epochs, without validation. The learning rates are still
    those of a schedule over `config.epochs`.
    """

    model: SequenceModel
    data: Sequences
    stage: str
    config: TrainConfig
    filter_seen: bool  # whether validation leaves out seen items
    state: ResumeState
    accelerator: Accelerator
    log: LogEpoch | None = None
    epochs: Mapping[str, int] | None = None  # of each phase


def fit(job: Fit) -> list[dict[str, Any]]:
    """Train the job's model in place, phase by phase, and leave it with the weights that were best on validation.

    Resumes from the saved state if there is one. On a CPU, the result equals that of an uninterrupted run bit for bit.

    Returns:
        One record per epoch: losses, validation metrics, learning rate, seconds, targets per second.

    Raises:
        FloatingPointError: loss, gradients or weights are not finite; the message names the settings to try.
        OSError: a resume state cannot be written.
        ValueError: there are no training or no validation cases.
    """
    return _Run(job).run()


class Cost(NamedTuple):
    """What training costs on this machine, estimated from a few steps and a sample of the validation cases."""

    step_s: float
    steps: int  # of an epoch
    validation_s: float
    memory: int  # bytes: the peak so far, of the process or of the accelerator

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch and its validation."""
        return self.step_s * self.steps + self.validation_s


def measure(job: Fit) -> Cost:
    """Return the cost of an epoch of the first phase. The steps train a copy of the model; no state is saved."""
    with torch.random.fork_rng():
        return _Run(replace(job, model=copy.deepcopy(job.model), epochs={}, log=None)).measure()


@dataclass
class Position:
    """How far a run has got; together with the tensors saved beside it, all that resuming needs."""

    phase: int = 0
    epoch: int = 0  # complete epochs of the phase
    batch: int = 0  # complete batches of the current epoch
    step: int = 0  # optimiser steps of the phase
    total_steps: int = 0  # of all phases
    best: float = -1.0  # best validation metric; -1: none yet
    waited: int = 0  # validations since the best one
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class _Step(nn.Module):
    """The module that DDP wraps: one forward call per step, however many passes the model makes inside it."""

    def __init__(self, model: SequenceModel, loss: Loss, config: TrainConfig) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.bf16, self.exclude_past = config.precision == "bf16", config.exclude_past
        self.contrast = contrast.term(config)

    def forward(self, example: Example) -> dict[str, Tensor]:
        device = example.target_BL.device.type
        views: list[Tensor] = []

        def task(query_BPD: Tensor, /, *, skip_last: bool = False) -> Tensor:
            if torch.is_grad_enabled():
                views.append(query_BPD[:, -1])
            width, stop = query_BPD.shape[1], example.target_BL.shape[1] - skip_last
            target_BP = example.target_BL[:, stop - width : stop]
            number = example.number - skip_last * len(target_BP)  # every row has a last target
            index = torch.nonzero_static(target_BP.flatten(), size=number).squeeze(1)
            with torch.autocast(device, enabled=False):
                query_ND = query_BPD.flatten(0, 1).index_select(0, index).float()
                past = (
                    objectives.past(example, self.model.options, index, width, skip_last) if self.exclude_past else None
                )
                value_N = self.loss(query_ND, self.model.item_vectors().float(), target_BP.flatten()[index], past)
            value_BP = value_N.new_zeros(target_BP.numel()).index_copy(0, index, value_N).view(target_BP.shape)
            return value_BP * example.weight

        with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
            terms = self.model.training_loss(example.batch, task)
            if self.contrast is not None:
                target_B = example.target_BL[:, -1]
                terms |= contrast.terms(self.contrast, self.model, example.batch, views[0], target_B, example.partner)
            return terms


@dataclass(frozen=True)
class _Phase:
    name: str
    options: Options  # those of the model, with the objective of the phase
    contrastive: bool  # whether batches include the target, as in the pre-training of `SelfSupervised`
    optimizers: list[Optimizer]
    step: nn.Module  # _Step, as DDP wraps it


class _Run:
    job: Fit
    device: torch.device
    model: SequenceModel  # on the device
    data: Sequences  # on the device, if resident
    position: Position
    phase: _Phase  # current phase
    best: dict[str, Tensor]  # weights of the phase's best epoch; empty before the first validation
    meter: EpochMeter  # of the current epoch
    order: torch.Generator  # draws the windows and batches of an epoch
    epoch_order: Tensor  # state of `order` at the start of the current epoch
    same_target: contrast.SameTarget | None  # source of the partners of a contrastive term
    bad_step: Tensor  # first step with a loss or gradient that was not finite

    def __init__(self, job: Fit) -> None:
        self.job, self.device = job, job.accelerator.device
        self.model = job.model.to(self.device)
        self.data = job.data.to(self.device, resident=job.config.resident)
        _require_cases(self.data, validated=job.epochs is None)
        self.position, self.best, self.meter = Position(), {}, EpochMeter(self.device)
        self.order = torch.Generator().manual_seed(job.config.seed)
        self.epoch_order = self.order.get_state()
        contrast.check(job.config, self.model, job.stage)
        self.same_target = contrast.same_target(self.data, job.config)
        self.bad_step = torch.full((), torch.iinfo(torch.int64).max, device=self.device)

    def run(self) -> list[dict[str, Any]]:
        config = self.job.config
        torch.manual_seed(config.seed + self.job.accelerator.process_index)
        torch.use_deterministic_algorithms(config.deterministic)
        phases = self.model.phases(self.job.stage)
        resumed = self.job.state.load()
        if resumed is not None:
            self.position = Position(**resumed[1]["position"])
        started = time.monotonic() - self.position.seconds
        for number in range(self.position.phase, len(phases)):
            self._enter(phases[number])
            if resumed is not None:
                self._restore(*resumed)
                resumed = None
            elif number > 0 and self.job.epochs is None:  # a later phase must beat the weights it starts from
                self._validate()
            self._run_phase(started)
            self.model.load_state_dict(self.best or self.model.state_dict())
            self.position = Position(
                phase=number + 1,
                total_steps=self.position.total_steps,
                seconds=self.position.seconds,
                history=self.position.history,
            )
            self.best = {}
        return self.position.history

    def _enter(self, name: str) -> None:
        config = self.job.config
        self.model.enter(name)
        options: Options = self.model.options
        contrastive = isinstance(self.model, SelfSupervised) and name == self.model.pretraining
        if contrastive and self.model.by_prefix:
            options = replace(options, objective="last")
        self.phase = _Phase(
            name=name,
            options=options,
            contrastive=contrastive,
            optimizers=optimizer.build(self.model, config),
            step=self.job.accelerator.prepare(_Step(self.model, Loss(config, self.data.count), config)),
        )

    def _run_phase(self, started: float) -> None:
        job, position = self.job, self.position
        epochs = job.config.epochs if job.epochs is None else job.epochs.get(self.phase.name, 0)
        with ProgressBar(job.accelerator.is_main_process) as bar:
            while position.epoch < epochs and position.waited < job.config.patience:
                if position.batch == 0:  # otherwise done before the interruption
                    self.model.eval()
                    with torch.no_grad():
                        self.model.on_epoch()
                self.model.train()
                self.meter.start()
                self._epoch(bar)
                self._end_epoch(started)

    def _epoch(self, bar: ProgressBar) -> None:
        """Train on the rest of the current epoch."""
        position, config = self.position, self.job.config
        self.order.set_state(self.epoch_order)
        windows = batches.windows(self.data, self.phase.options, config, self.order)
        plan = self._plan(windows)
        total = config.epochs * len(plan)
        bar.start(total, position.step)
        for example in self._examples(windows, plan[position.batch :]):
            optimizer.set_learning_rate(self.phase.optimizers, optimizer.learning_rate(position.step, total, config))
            self._step(example)
            if position.total_steps == FIRST_STEPS <= position.batch:
                self._announce(total)
            if position.step % config.save_steps == 0 and position.batch < len(plan):
                self._save()
            self._show(bar)

    def _plan(self, windows: Windows) -> list[Tensor]:
        config = self.job.config
        if self.phase.contrastive:
            processes = self.job.accelerator.num_processes
            return batches.plan_of_size(len(windows.user), config.batch_size, processes, self.order)
        return batches.plan(windows.width, config.batch_size, self.order)

    def _step(self, example: Example) -> None:
        position, clip_norm = self.position, self.job.config.clip_norm
        terms = self.phase.step(example)
        loss = torch.stack([value for name, value in terms.items() if not name.startswith(FIGURE)]).sum()
        self.model.zero_grad(set_to_none=True)
        self.job.accelerator.backward(loss)
        norm = clip_gradients(self.model, clip_norm) if clip_norm else loss.detach()
        for chosen in self.phase.optimizers:
            chosen.step()
        position.step += 1
        position.batch += 1
        position.total_steps += 1
        self._account(terms, loss, norm)
        self.meter.targets += example.number * self.job.accelerator.num_processes

    def measure(self) -> Cost:
        """Return the cost of an epoch of the first phase. A few steps change the model."""
        self._enter(self.model.phases(self.job.stage)[0])
        self.model.eval()
        with torch.no_grad():
            self.model.on_epoch()
        self.model.train()
        windows = batches.windows(self.data, self.phase.options, self.job.config, self.order)
        plan = self._plan(windows)
        optimizer.set_learning_rate(self.phase.optimizers, 0.0)
        seconds = []
        for example in self._examples(windows, plan[: FIRST_STEPS + 1]):
            began = time.monotonic()
            self._step(example)
            float(self.meter.sums[0])  # waits for the device
            seconds.append(time.monotonic() - began)
        usual = seconds[1:] or seconds  # the first step also allocates memory
        return Cost(sum(usual) / len(usual), len(plan), self._validation_seconds(), peak_memory(self.device))

    def _validation_seconds(self) -> float:
        cases = sequences.cases(self.data, "valid")
        some = Cases(*(values[:: max(1, len(cases) // PROBE_CASES)] for values in (cases.user, cases.position)))
        began = time.monotonic()
        ranking.rank(ranking.model_scorer(self.model.eval()), self.data, some, filter_seen=self.job.filter_seen)
        return (time.monotonic() - began) * len(cases) / max(1, len(some))

    def _announce(self, total: int) -> None:
        """Log the longest that the phase can take, and its memory, unless it is short."""
        float(self.meter.sums[0])  # waits for the device
        seconds = (time.monotonic() - self.meter.began) / FIRST_STEPS * total
        if seconds > LONG_S and self.job.accelerator.is_main_process:
            logger.info(
                "%s: about %.0f minutes for all %d epochs, validation not counted; early stopping may end it sooner. "
                "Memory so far: %.1f GB",
                self.job.stage,
                seconds / 60,
                self.job.config.epochs,
                peak_memory(self.device) / 1e9,
            )

    def _end_epoch(self, started: float) -> None:
        """Record, validate, report and save the epoch that has just ended."""
        position, config = self.position, self.job.config
        record = self._record()
        position.epoch, position.batch = position.epoch + 1, 0
        self.epoch_order = self.order.get_state()
        self.meter.clear()
        due = position.epoch % config.eval_every == 0 or position.epoch == config.epochs
        if due and self.job.epochs is None:
            record |= self._validate()
        position.seconds = time.monotonic() - started
        position.history.append(record)
        if self.job.accelerator.is_main_process:
            if self.job.log is not None:
                self.job.log(record, len(position.history))
            report_epoch(self.job.stage, record, config.epochs)
        self._save()

    def _examples(self, windows: Windows, plan: Sequence[Tensor]) -> Iterator[Example]:
        """Yield the examples of the batches in `plan`, which hold indices into `windows`."""
        first_step = self.position.total_steps

        def make(number: int) -> Example:
            chosen = Windows(*(x[plan[number]] for x in windows))
            return self._example(chosen, first_step + number)

        return map(make, range(len(plan))) if self.job.config.resident else ahead(make, len(plan), self.device)

    def _example(self, chosen: Windows, step: int) -> Example:
        config, accelerator = self.job.config, self.job.accelerator
        example = objectives.example(
            self.data,
            self.phase.options,
            config,
            chosen,
            seed=config.seed * 1_000_003 + step,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
            same_target=self.same_target,
        )
        return objectives.with_target(example) if self.phase.contrastive else example

    def _account(self, terms: dict[str, Tensor], loss: Tensor, norm: Tensor) -> None:
        self.meter.add(loss, terms)
        step = self.position.step
        finite = (loss.detach() + norm).isfinite()
        self.bad_step = torch.where(finite, self.bad_step, self.bad_step.clamp(max=step))
        if self.device.type == "cpu" or step % REPORT_STEPS == 0:
            self._check_finite()

    def _check_finite(self) -> None:
        if (bad := int(self.bad_step)) <= self.position.step:
            raise self._diverged("the loss or its gradient is", bad)

    def _check_weights(self) -> None:
        """Raise FloatingPointError before weights that are not finite are measured or saved."""
        self._check_finite()
        if names := not_finite(self.model.state_dict()):
            raise self._diverged(f"the weights {', '.join(names)} are", self.position.step)

    def _diverged(self, what: str, step: int) -> FloatingPointError:
        stage = self.job.stage
        return FloatingPointError(
            f"{what} not finite at step {step} of {stage}: try a smaller {stage}.learning_rate, "
            f"more {stage}.warmup_steps, a smaller {stage}.clip_norm or {stage}.precision: fp32"
        )

    def _record(self) -> dict[str, Any]:
        self._check_weights()
        seconds = time.monotonic() - self.meter.began
        means = self.job.accelerator.reduce(self.meter.sums, reduction="mean") / self.position.batch
        return {
            "phase": self.phase.name,
            "epoch": self.position.epoch + 1,
            "step": self.position.step,
            **dict(zip(self.meter.names, means.tolist(), strict=True)),
            "learning_rate": self.phase.optimizers[0].param_groups[0]["lr"],
            "seconds": seconds,
            "targets_per_second": self.meter.targets_per_second(seconds),
        }

    def _validate(self) -> dict[str, float]:
        job, position = self.job, self.position
        if self.phase.contrastive:
            assert isinstance(self.model, SelfSupervised)
            values = validation.in_batch_accuracy(self.model, self.data, job.config.batch_size, job.accelerator)
        else:
            values = validation.validate(
                self.model,
                self.data,
                filter_seen=job.filter_seen,
                known_U=batches.trained_users(self.data, job.config).to(self.data.start.device),
                accelerator=job.accelerator,
            )
        metrics.require_possible(values, type(self.model).__name__)
        value = values[self._metric()]
        position.waited += 1
        if value > position.best:
            position.best, position.waited = value, 0
            self.best = {name: weight.detach().clone() for name, weight in self.model.state_dict().items()}
        return values

    def _metric(self) -> str:
        return ACCURACY if self.phase.contrastive else METRIC

    def _save(self) -> None:
        self._check_weights()
        accelerator = self.job.accelerator
        rng = accelerator.gather(torch.get_rng_state().to(self.device)[None]).cpu()
        tensors = {"rng": rng, "order": self.epoch_order, "sums": self.meter.sums}
        tensors |= {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        tensors |= optimizer.tensors_of(self.phase.optimizers)
        if self.device.type == "cuda":
            tensors["rng_cuda"] = accelerator.gather(torch.cuda.get_rng_state().to(self.device)[None]).cpu()
        if accelerator.is_main_process:
            facts = {"position": asdict(self.position), "terms": self.meter.names}
            self.job.state.save(self.position.total_steps, tensors, facts)

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        position = self.position
        logger.info("resuming %s at epoch %d, batch %d", self.job.stage, position.epoch + 1, position.batch)
        self.model.load_state_dict(below("model.", tensors))
        self.best = {name: value.to(self.device) for name, value in below("best.", tensors).items()}
        optimizer.restore(self.phase.optimizers, tensors)
        self.epoch_order = tensors["order"]
        self.meter.sums, self.meter.names = tensors["sums"].to(self.device), facts["terms"]
        process = self.job.accelerator.process_index
        if process < len(tensors["rng"]):
            torch.set_rng_state(tensors["rng"][process])
        if "rng_cuda" in tensors and self.device.type == "cuda" and process < len(tensors["rng_cuda"]):
            torch.cuda.set_rng_state(tensors["rng_cuda"][process])

    def _show(self, bar: ProgressBar) -> None:
        position, meter = self.position, self.meter
        if bar.hidden or (self.device.type != "cpu" and position.step % REPORT_STEPS):
            return
        best = "" if position.best < 0 else f"  best {self._metric()} {position.best:.4f}"
        loss = float(meter.sums[0]) / position.batch
        speed = meter.targets_per_second(time.monotonic() - meter.began)
        text = (
            f"{self.job.stage} {self.phase.name} epoch {position.epoch + 1}/{self.job.config.epochs}  "
            f"loss {loss:.4f}{best}  {speed:,.0f} targets/s"
        )
        bar.show(position.step, text)


def _require_cases(data: Sequences, *, validated: bool) -> None:
    """Raise ValueError if there are no training cases, or no validation cases although `validated`."""
    if validated and bool((data.valid_stop == data.train_stop).all()):
        raise ValueError("no validation cases to stop on: check prepare.protocol, prepare.valid_share and the k-core")
    if bool((data.train_stop - data.start < 2).all()):
        raise ValueError("no user has two training events: lower prepare.min_user_events or use a larger dataset")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held so far: on a GPU those of its tensors there, else all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks. By default each step returns them, and every page has to be faulted in again."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(ctypes.c_int(-1), ctypes.c_int(2**31 - 1))  # M_TRIM_THRESHOLD
            libc.mallopt(ctypes.c_int(-3), ctypes.c_int(2**30))  # M_MMAP_THRESHOLD
