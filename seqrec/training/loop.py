"""The training loop that every model shares: batches, phases, early stopping, exact resume.

All data is on the device; a batch is a few gathers. One step never waits for the device except to report.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from models.base import SequenceModel
from seqrec.artifacts import HISTORY, MODEL_CARD, SPLIT_CARD, TOKENS, WEIGHTS, read_json, replaced, write_text
from seqrec.config import EXPERIMENT, ConfigError, CountsConfig, FinetuneConfig, RegisterConfig, TrainConfig, parse
from seqrec.counts import search, term
from seqrec.counts.term import CountTerm
from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.training import objectives
from seqrec.training.checkpoint import ResumeState, fingerprint, load_model, not_finite, save_counts, save_model
from seqrec.training.objectives import Example, Loss, Windows
from seqrec.training.prefetch import ahead

logger = logging.getLogger(__name__)
METRIC = "valid/ndcg@10"
ACCURACY = "valid/accuracy"  # of a contrastive phase: what selects its weights
FIGURE = "figure/"  # prefix of what a model reports besides the terms of its loss
REPORT_STEPS = 50  # steps between looks at the loss on an accelerator
LogEpoch = Callable[[dict[str, Any], int], None]


@dataclass
class Position:
    """Where a run stands; with the tensors beside it, all that resuming needs."""

    phase: int = 0
    epoch: int = 0  # complete epochs of the phase
    batch: int = 0  # complete batches of the running epoch
    step: int = 0  # optimiser steps of the phase
    total_steps: int = 0  # of all phases
    best: float = -1.0  # validation metric; none yet
    waited: int = 0  # evaluations since the best
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Return the rate of `step` (0-based) of `total`: linear warm-up, then a cosine down to min_learning_rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    low = config.min_learning_rate
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def optimizers(model: SequenceModel, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return AdamW over the trainable parameters; with `sparse_tables`, Adam over the rows used for embedding tables.

    Raises:
        ConfigError: `sparse_tables`, but the model computes its item vectors from more than one table.
    """
    tables: list[Tensor] = []
    if config.sparse_tables:
        embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding)]
        tables = [part.weight for part in embeddings if part.weight.requires_grad]
        if not any(model.item_vectors() is table for table in tables):
            raise ConfigError(f"sparse_tables: {type(model).__name__} has no plain table of items; set it to false")
        for part in embeddings:
            part.sparse = True
    dense = {n: p for n, p in model.named_parameters() if p.requires_grad and not any(p is table for table in tables)}
    spared = {n for n, p in dense.items() if p.ndim < 2 or n.endswith(model.undecayed)}  # biases, gains, normalisations
    groups = [
        {"params": [p for n, p in dense.items() if n not in spared], "weight_decay": config.weight_decay},
        {"params": [p for n, p in dense.items() if n in spared], "weight_decay": 0.0},
    ]
    chosen: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)]
    return chosen + ([torch.optim.SparseAdam(tables, lr=config.learning_rate)] if tables else [])


def clip_gradients(model: SequenceModel, limit: float) -> Tensor:
    """Scale the gradients so that their joint norm is at most `limit`, and so is that of those to be clipped apart.

    Returns:
        The sum of both norms before; a scalar, not finite where a gradient is not.
    """
    together, apart = (
        _clip([p for name, p in model.named_parameters() if name.endswith(model.clipped_apart) is chosen], limit)
        for chosen in (False, True)
    )
    return together + apart


def _clip(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return nn.utils.clip_grad_norm_(parameters, limit)
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm: Tensor = torch.stack([value.norm() for value in values]).norm()
    for value in values:
        value.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def validate(
    model: SequenceModel, data: Sequences, *, filter_seen: bool, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Return the metrics on the validation cases; processes share the work and get the same numbers."""
    chosen = sequences.cases(data, "valid")
    if accelerator is not None:
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        chosen = Cases(user=chosen.user[mine], position=chosen.position[mine])
    was_training = model.training
    model.eval()
    name = type(model).__name__
    ranked = ranking.rank(ranking.model_scorer(model), data, chosen, filter_seen=filter_seen, name=name)
    model.train(was_training)
    counts = metrics.histogram(ranked.rank if filter_seen else ranked.rank_unfiltered, data.num_items)
    if accelerator is not None:
        counts = accelerator.reduce(counts)
    values = metrics.from_histogram(counts)
    return {f"valid/{name}": values[name] for name in ("ndcg@10", "recall@10", "mrr")}


@torch.no_grad()
def in_batch_accuracy(
    model: SequenceModel, data: Sequences, rows: int, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Return the share of validation cases with a history whose target the model tells apart from those of `rows`."""
    chosen = sequences.cases(data, "valid")
    known = chosen.position > data.start[chosen.user]
    chosen = Cases(user=chosen.user[known], position=chosen.position[known])
    was_training = model.training
    model.eval()
    hits = torch.zeros(2, dtype=torch.int64, device=data.device)
    blocks = torch.arange(len(chosen), device=chosen.user.device).split(rows)
    first, step = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    for block in blocks[first::step]:
        user, position = chosen.user[block], chosen.position[block]
        batch = sequences.window(data, user, position + 1, model.options.length + 1)  # the target is its last event
        hits += torch.stack([model.hits(batch).sum(), torch.tensor(len(block), device=hits.device)])
    model.train(was_training)
    found, number = (hits if accelerator is None else accelerator.reduce(hits)).tolist()
    return {ACCURACY: found / max(1, number)}


class _Step(nn.Module):
    """What DDP wraps: one forward call per step, however many passes the model makes inside."""

    def __init__(self, model: SequenceModel, loss: Loss, config: TrainConfig) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.bf16, self.exclude_past = config.precision == "bf16", config.exclude_past

    def forward(self, example: Example) -> dict[str, Tensor]:
        device = example.target_BL.device.type

        def task(query_BPD: Tensor) -> Tensor:
            width = query_BPD.shape[1]
            target_BP = example.target_BL[:, -width:]
            index = torch.nonzero_static(target_BP.flatten(), size=example.number).squeeze(1)
            with torch.autocast(device, enabled=False):
                query_ND = query_BPD.flatten(0, 1).index_select(0, index).float()
                past = objectives.past(example, self.model.options, index, width) if self.exclude_past else None
                value_N = self.loss(query_ND, self.model.item_vectors().float(), target_BP.flatten()[index], past)
            value_BP = value_N.new_zeros(target_BP.numel()).index_copy(0, index, value_N).view(target_BP.shape)
            return value_BP * example.weight

        with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
            return self.model.training_loss(example.batch, task)


def fit(
    model: SequenceModel,
    data: Sequences,
    stage: str,
    config: TrainConfig,
    *,
    filter_seen: bool,
    state: ResumeState,
    accelerator: Accelerator,
    log: LogEpoch | None = None,
    epochs: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Train `model` in place through its phases of `stage`; it ends with the best weights on validation.

    With `epochs`, of each phase, it ends after exactly so many, with the rates that they have among `config.epochs`,
    and nothing is validated.

    Continues from `state` if there is one, with the result of a run that was never interrupted, bit for bit on a CPU.

    Returns:
        One record per epoch: losses, validation metrics, learning rate, seconds, targets per second.

    Raises:
        FloatingPointError: loss, gradients or weights are not finite; the message names the settings to try.
        OSError: a resume state cannot be written.
    """
    return _Run(model, data, stage, config, filter_seen, state, accelerator, log, epochs).run()


def train(
    model: SequenceModel,
    data: Sequences,
    stage: str,
    config: TrainConfig,
    *,
    name: str,
    inputs: Sequence[Path],
    output: Path,
    state: Path,
    filter_seen: bool,
    resume: bool,
    log: LogEpoch | None = None,
    content: Sequence[str] = (),
    finish: Callable[[SequenceModel], None] | None = None,
    epochs: Mapping[str, int] | None = None,
    earlier_seconds: float = 0.0,
    experiment: str = EXPERIMENT,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Run the phases of `stage` and write weights, card and history to `output`; return the figures of the run.

    `output` is replaced in one step, and with it whatever it held.

    `log` gets the record of every epoch in place of MLflow; what it raises ends the training, the state stays.
    `content` names what else the result depends on; `finish` is done to the model between training and saving;
    `epochs`: see `fit`; the card's seconds count `earlier_seconds` too, those of the weights it starts from;
    `experiment` is MLflow's; `files` belong to the model, see `save_model`; the card holds `facts`, too.

    Raises:
        ConfigError: `resume` was asked for and no state matches.
    """
    read = (SPLIT_CARD, WEIGHTS, TOKENS)
    hashed = [folder / file for folder in inputs for file in read if (folder / file).exists()]
    belongings = [f"{name} {hashlib.sha256(file).hexdigest()}" for name, file in (files or {}).items()]
    # two sets of options may start from the same weights (dropout has none), so the options count as well
    deciding = (name, type(model).__name__, model.options, filter_seen, config, *content, *belongings)
    identity = fingerprint(f"seqrec.stages.{stage}", deciding, *hashed)
    resume_state = ResumeState(state, identity)
    if (finished := _finished(output, identity)) is not None:
        logger.info("%s of %s: %s already holds the result of exactly this training", stage, name, output)
        resume_state.delete()
        return finished
    if resume and resume_state.load() is None:
        raise ConfigError(
            f"--resume: no state in {state} belongs to this {stage} of {name} (config, data or code differ)"
        )
    history: list[dict[str, Any]] = []
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if model.phases(stage):
        keep_freed_memory()
        with nullcontext(log) if log else live_log(identity, f"{name} {stage}", experiment) as log_epoch:
            history = fit(
                model,
                data,
                stage,
                config,
                filter_seen=filter_seen,
                state=resume_state,
                accelerator=accelerator,
                log=log_epoch,
                epochs=epochs,
            )
        forget_users(model, ~objectives.trained_users(data, config))
    values = _summary(history)
    if finish is not None:
        finish(model)
    if accelerator.is_main_process:
        described = {
            "model": name,
            "stage": stage,
            "fingerprint": identity,
            "config": asdict(config),
            "seconds": earlier_seconds + values["seconds"],
            "filter_seen": filter_seen,
            "median_gap": sequences.median_gap(data),
        }
        described |= dict(facts or {})
        with replaced(output) as folder:
            if isinstance(config, FinetuneConfig) and config.counts != "none":
                counts, chosen = count_term(model, data, config, filter_seen=filter_seen)
                described["counts"] = save_counts(folder, counts, chosen)
            save_model(folder, model, described, files)
            write_text(folder / HISTORY, "".join(json.dumps(record) + "\n" for record in history))
        resume_state.delete()
    return values


@torch.no_grad()
def forget_users(model: SequenceModel, unknown_U: Tensor) -> None:
    """Give the users that training had no target of the vector of user 0: whoever asks for them gets that answer."""
    for table in model.user_tables():
        table.weight[1:][unknown_U.to(table.weight.device)] = table.weight[0]


def count_term(
    model: SequenceModel, data: Sequences, config: FinetuneConfig, *, filter_seen: bool
) -> tuple[CountTerm | None, dict[str, Any]]:
    """Return what counts add to the scores of a trained model, and how that was chosen: see `finetune.counts`.

    Args:
        model: trained.
        data: the prepared dataset, on the host; what follows `train_stop` is not counted.
        config: section `finetune`; `counts` is `auto` or the values.
        filter_seen: whether validation leaves out seen items.
    """
    seen = model.options.history
    if not isinstance(config.counts, str):
        values = parse(CountsConfig, config.counts, "finetune.counts")
        if values.events > seen:
            raise ConfigError(f"finetune.counts.events: {values.events} is more than the {seen} that the model sees")
        return (term.build(data, values) if values.alpha else None), asdict(values)
    device = next(model.parameters()).device
    near = data.to(device, resident=config.resident)
    tables, scorer = search.Tables(data), ranking.model_scorer(model.eval())
    choice = search.choose(scorer, tables, near, filter_seen=filter_seen, events=seen)
    logger.info(
        "counts: alpha %g; %s %.4f on the half of the users that did not choose it",
        choice.values.alpha,
        METRIC,
        choice.honest,
    )
    return tables.term(choice.values), choice.card()


def _summary(history: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = {"epochs": len(history), "seconds": sum(record["seconds"] for record in history)}
    for name in (METRIC, ACCURACY):
        best = [record[name] for record in history if name in record]
        values |= {name: max(best)} if best else {}
    return values


def _finished(output: Path, identity: str) -> dict[str, float] | None:
    """Return the figures of `output` if it holds the result of the training `identity`, unharmed."""
    if (
        not all((output / file).exists() for file in (HISTORY, MODEL_CARD))
        or read_json(output / MODEL_CARD)["fingerprint"] != identity
    ):
        return None
    load_model(output)  # verifies the weights
    return _summary([json.loads(line) for line in (output / HISTORY).read_text(encoding="utf-8").splitlines()])


@contextmanager
def live_log(identity: str, name: str, experiment: str) -> Iterator[LogEpoch | None]:
    """Log epochs while training where MLFLOW_TRACKING_URI names a server; otherwise register brings them in."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        yield None
        return
    from seqrec.tracking.runs import live_run

    with live_run(identity, name, RegisterConfig(experiment=experiment)) as log:
        yield log


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks: by default each step returns them and faults every page in again."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(ctypes.c_int(-1), ctypes.c_int(2**31 - 1))  # M_TRIM_THRESHOLD
            libc.mallopt(ctypes.c_int(-3), ctypes.c_int(2**30))  # M_MMAP_THRESHOLD


class _Run:
    def __init__(
        self,
        model: SequenceModel,
        data: Sequences,
        stage: str,
        config: TrainConfig,
        filter_seen: bool,
        state: ResumeState,
        accelerator: Accelerator,
        log: LogEpoch | None,
        epochs: Mapping[str, int] | None,
    ) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.model = model.to(self.device)
        self.data = data.to(self.device, resident=config.resident)
        self.stage, self.config, self.filter_seen, self.state, self.log = stage, config, filter_seen, state, log
        self.position, self.epochs = Position(), epochs
        if epochs is None and bool((data.valid_stop == data.train_stop).all()):
            raise ValueError(
                "no validation cases to stop on: check prepare.protocol, prepare.valid_share and the k-core"
            )
        if bool((data.train_stop - data.start < 2).all()):
            raise ValueError("no user has two training events: lower prepare.min_user_events or use a larger dataset")
        self.order = torch.Generator().manual_seed(config.seed)
        self.epoch_order = self.order.get_state()
        self.best: dict[str, Tensor] = {}
        self.sums = torch.zeros(0, device=self.device)
        self.bad_step = torch.full((), torch.iinfo(torch.int64).max, device=self.device)

    def run(self) -> list[dict[str, Any]]:
        torch.manual_seed(self.config.seed + self.accelerator.process_index)
        torch.use_deterministic_algorithms(self.config.deterministic)
        phases = self.model.phases(self.stage)
        resumed = self.state.load()
        if resumed is not None:
            self.position = Position(**resumed[1]["position"])
        started = time.monotonic() - self.position.seconds
        for number in range(self.position.phase, len(phases)):
            self._enter(phases[number])
            if resumed is not None:
                self._restore(*resumed)
                resumed = None
            elif number > 0 and self.epochs is None:  # a later phase must beat what the one before it left
                self._evaluate()
            self._run_phase(phases[number], started)
            self.model.load_state_dict(self.best or self.model.state_dict())
            self.position = Position(
                phase=number + 1,
                total_steps=self.position.total_steps,
                seconds=self.position.seconds,
                history=self.position.history,
            )
            self.best = {}
        return self.position.history

    def _enter(self, phase: str) -> None:
        self.model.enter(phase)
        self.contrastive = phase in self.model.contrastive
        self.optimizers = optimizers(self.model, self.config)
        loss = Loss(self.config, self.data.count)
        self.step_module = self.accelerator.prepare(_Step(self.model, loss, self.config))

    def _run_phase(self, phase: str, started: float) -> None:
        config, position = self.config, self.position
        number = config.epochs if self.epochs is None else self.epochs.get(phase, 0)
        with _progress(self.accelerator.is_main_process) as progress:
            task = progress.add_task("", total=None)
            while position.epoch < number and position.waited < config.patience:
                if position.batch == 0:  # else it was done before the interruption
                    self.model.eval()
                    with torch.no_grad():
                        self.model.on_epoch()
                self.model.train()
                self.began, self.targets = time.monotonic(), 0
                self._epoch(progress, task, phase)
                record = self._record(phase)
                position.epoch, position.batch = position.epoch + 1, 0
                self.epoch_order = self.order.get_state()
                self.sums = torch.zeros(0, device=self.device)
                due = position.epoch % config.eval_every == 0 or position.epoch == config.epochs
                if due and self.epochs is None:
                    record |= self._evaluate()
                position.seconds = time.monotonic() - started
                position.history.append(record)
                self._report(record)
                self._save()

    def _epoch(self, progress: Progress, task: Any, phase: str) -> None:
        position, config = self.position, self.config
        self.order.set_state(self.epoch_order)
        self.windows = objectives.windows(self.data, self.model.options, config, self.order)
        if self.contrastive:
            rows, processes = len(self.windows.user), self.accelerator.num_processes
            plan = objectives.plan_of_size(rows, config.batch_size, processes, self.order)
        else:
            plan = objectives.plan(self.windows.width, config.batch_size, self.order)
        total = config.epochs * len(plan)
        progress.update(task, total=total, completed=position.step)
        for number, example in enumerate(self._examples(plan[position.batch :]), position.batch):
            rate = learning_rate(position.step, total, config)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            terms = self.step_module(example)
            loss = torch.stack([value for name, value in terms.items() if not name.startswith(FIGURE)]).sum()
            self.model.zero_grad(set_to_none=True)
            self.accelerator.backward(loss)
            norm = clip_gradients(self.model, config.clip_norm) if config.clip_norm else loss.detach()
            for optimizer in self.optimizers:
                optimizer.step()
            position.step, position.batch = position.step + 1, number + 1
            position.total_steps += 1
            self._account(terms, loss, norm)
            self.targets += example.number * self.accelerator.num_processes
            if position.step % config.save_steps == 0 and position.batch < len(plan):
                self._save()
            self._show(progress, task, phase)

    def _examples(self, plan: Sequence[Tensor]) -> Iterator[Example]:
        step = self.position.total_steps

        def make(place: int) -> Example:
            return self._example(plan[place], step + place)

        return map(make, range(len(plan))) if self.config.resident else ahead(make, len(plan), self.device)

    def _example(self, chosen: Tensor, step: int) -> Example:
        example = objectives.example(
            self.data,
            self.model.options,
            self.config,
            Windows(*(x[chosen] for x in self.windows)),
            seed=self.config.seed * 1_000_003 + step,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )
        return objectives.with_target(example) if self.contrastive else example

    def _account(self, terms: dict[str, Tensor], loss: Tensor, norm: Tensor) -> None:
        values = torch.stack([loss, *terms.values()]).detach().float()
        self.term_names = ["loss", *(name if name.startswith(FIGURE) else f"loss/{name}" for name in terms)]
        self.sums = values if len(self.sums) == 0 else self.sums + values
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
        return FloatingPointError(
            f"{what} not finite at step {step} of {self.stage}: try a smaller {self.stage}.learning_rate, "
            f"more {self.stage}.warmup_steps, a smaller {self.stage}.clip_norm or {self.stage}.precision: fp32"
        )

    def _record(self, phase: str) -> dict[str, Any]:
        self._check_weights()
        seconds = time.monotonic() - self.began
        means = self.accelerator.reduce(self.sums, reduction="mean") / self.position.batch
        return {
            "phase": phase,
            "epoch": self.position.epoch + 1,
            "step": self.position.step,
            **dict(zip(self.term_names, means.tolist(), strict=True)),
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "seconds": seconds,
            "targets_per_second": self.targets / max(seconds, 1e-9),
        }

    def _evaluate(self) -> dict[str, float]:
        if self.contrastive:
            values = in_batch_accuracy(self.model, self.data, self.config.batch_size, self.accelerator)
        else:
            values = validate(self.model, self.data, filter_seen=self.filter_seen, accelerator=self.accelerator)
        metrics.require_possible(values, type(self.model).__name__)
        position, value = self.position, values[ACCURACY if self.contrastive else METRIC]
        position.waited += 1
        if value > position.best:
            position.best, position.waited = value, 0
            self.best = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return values

    def _save(self) -> None:
        self._check_weights()
        rng = self.accelerator.gather(torch.get_rng_state().to(self.device)[None]).cpu()
        tensors = {"rng": rng, "order": self.epoch_order, "sums": self.sums}
        tensors |= {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                prefix = f"optimizer.{number}.{index}."
                tensors |= {prefix + name: torch.as_tensor(value) for name, value in values.items()}
        if self.device.type == "cuda":
            tensors["rng_cuda"] = self.accelerator.gather(torch.cuda.get_rng_state().to(self.device)[None]).cpu()
        if self.accelerator.is_main_process:
            facts = {"position": asdict(self.position), "terms": self.term_names}
            self.state.save(self.position.total_steps, tensors, facts)

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        position = self.position
        logger.info("resuming %s at epoch %d, batch %d", self.stage, position.epoch + 1, position.batch)
        self.model.load_state_dict(_below("model.", tensors))
        self.best = {name: value.to(self.device) for name, value in _below("best.", tensors).items()}
        for number, optimizer in enumerate(self.optimizers):
            saved = optimizer.state_dict()
            for name, value in _below(f"optimizer.{number}.", tensors).items():
                index, key = name.split(".", 1)
                counts = key == "step" and isinstance(optimizer, torch.optim.SparseAdam)  # there a number of Python's
                saved["state"].setdefault(int(index), {})[key] = value.item() if counts else value
            optimizer.load_state_dict(saved)
        self.epoch_order, self.sums, self.term_names = tensors["order"], tensors["sums"].to(self.device), facts["terms"]
        process = self.accelerator.process_index
        if process < len(tensors["rng"]):
            torch.set_rng_state(tensors["rng"][process])
        if "rng_cuda" in tensors and self.device.type == "cuda" and process < len(tensors["rng_cuda"]):
            torch.cuda.set_rng_state(tensors["rng_cuda"][process])

    def _show(self, progress: Progress, task: Any, phase: str) -> None:
        if progress.disable or (self.device.type != "cpu" and self.position.step % REPORT_STEPS):
            return
        name = ACCURACY if self.contrastive else METRIC
        best = "" if self.position.best < 0 else f"  best {name} {self.position.best:.4f}"
        loss = float(self.sums[0]) / self.position.batch
        rate = self.targets / max(time.monotonic() - self.began, 1e-9)
        text = (
            f"{self.stage} {phase} epoch {self.position.epoch + 1}/{self.config.epochs}  "
            f"loss {loss:.4f}{best}  {rate:,.0f} targets/s"
        )
        progress.update(task, completed=self.position.step, description=text)

    def _report(self, record: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        if self.log is not None:
            self.log(record, len(self.position.history))
        metric = "".join(f"  {name} {record[name]:.4f}" for name in (METRIC, ACCURACY) if name in record)
        logger.info(
            "%s %s epoch %d/%d  loss %.4f%s  %.0f targets/s  %.1f s",
            self.stage,
            record["phase"],
            record["epoch"],
            self.config.epochs,
            record["loss"],
            metric,
            record["targets_per_second"],
            record["seconds"],
        )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _progress(shown: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty()))
