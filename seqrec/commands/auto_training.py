"""The models of `seqrec auto`: their settings, and how much training fits into the budget."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqrec.commands import run
from seqrec.commands.auto_plan import Plan
from seqrec.config import AUTO, Params, from_dict
from seqrec.data import sequences
from seqrec.pipeline import BY_NAME
from seqrec.training import auto_settings
from seqrec.training.auto_settings import Shape

if TYPE_CHECKING:
    from seqrec.training.cost import Cost

logger = logging.getLogger(__name__)
OPTIONS: dict[str, dict[str, Any]] = {
    "flash4rec": {"prediction_head": False, "topk_dropout_k": 3},
    # a history as a sequence of items, each the mean of its words' vectors
    "recformer": {
        "encoder": "items",
        "objective": "causal",
        "d_model": 64,
        "layers": 0,
        "dropout": 0.1,
        "pooling": "mean",
        "frozen_words": (),
        "history_dropout": 0.3,
    },
    "sasrec": {"heads": 2},
    "gru4rec": {},
}
LEAST_EPOCHS = 0.25  # share of a model's epochs that must fit into the budget, unless it is the first model
LEAST_STEPS = 100  # of the first model's training, or those of one epoch if they are fewer
RESERVE = 0.15  # share of a model's budget that counts and evaluation need
ModelSettings = Callable[[Mapping[str, int]], dict[str, Any]]  # entry of a model in `models`, from limits of finetune


def train(
    plan: Plan,
    name: str,
    settings: ModelSettings,
    folder: Path,
    out: Path,
    *,
    share: float | None = None,
    members: int = 1,
) -> None:
    """Train and evaluate one model; leave it out if too few epochs fit into the budget, unless it is the first.

    `settings` returns the model's entry, given the epochs and their steps that fit into the budget, which limits them
    only if a `share` is given. The model has up to `members` networks, as many as can be trained for all epochs in
    `share` seconds.
    """
    if name not in plan.params["models"]:
        entry = settings({})
        if share is not None:
            if not (fit := _fit(plan, name, entry, folder, out, share)):
                return
            entry = settings(fit.limits)
            entry["finetune"].setdefault("ease_items", plan.ease_items)
            if (affordable := min(members, fit.of_share // fit.limits["epochs"])) > 1:
                entry["options"]["members"] = affordable
                logger.info("%s is the mean of %d networks, because the data has few users", name, affordable)
        plan.set_model(name, entry)
    run.train_model(from_dict(plan.params), name, folder, out)
    plan.save(name)


def model_settings(
    name: str,
    shape: Shape,
    limits: Mapping[str, int],
    *,
    options: Mapping[str, Any] | None = None,
    pretrain: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entry of a model in `models`: the settings given, and those of the rules for everything else.

    `limits` take the place of settings of `finetune`.
    """
    given = {**(finetune or {}), **limits}
    own = OPTIONS.get(name, {})
    if (options or {}).get("encoder", AUTO) not in (AUTO, own.get("encoder")):
        own = {}  # they suit the other encoder
    ruled = auto_settings.options(name, shape) | own
    set_ = {option: value for option, value in (options or {}).items() if value != AUTO or option not in ruled}
    chosen = auto_settings.merged(ruled, set_, "options")
    training = {"counts": "auto"} | auto_settings.finetune(shape, given, name, chosen)
    start = auto_settings.item_vectors(shape, chosen, auto_settings.number_of_targets(shape, training))
    return {"options": chosen, "pretrain": {"item_vectors": start} | dict(pretrain or {}), "finetune": training}


class Fit(NamedTuple):
    """The training that fits into the budget."""

    limits: dict[str, int]  # settings of finetune
    of_share: int  # epochs that fit into the model's equal share of the time


def _fit(plan: Plan, name: str, entry: Mapping[str, Any], folder: Path, out: Path, share: float) -> Fit | None:
    """Return the training that a model gets, estimated from a few steps; None leaves it out.

    It gets all epochs that fit into the budget, at the cost of the models after it, because one sound model beats three
    poor ones. If fewer than FEWEST_EPOCHS fit, it gets so many of fewer steps.
    """
    first = not plan.params["models"]
    if share <= 0 and not first:
        logger.warning("%s is left out: the budget is spent", name)
        return None
    settings = {"models": {name: entry}, "leaderboard": [name]}
    params = from_dict(plan.params | settings)
    began = time.monotonic()
    BY_NAME["pretrain"](params, out, name, sequences=folder, data=folder.parent)
    cost = _cost(params, name, folder, out)
    wanted = params.section("finetune", model=name).epochs
    probe = time.monotonic() - began
    left = max(0.0, plan.left())
    of_share, training_s = (_for_training(seconds, cost, plan.baselines_s) for seconds in (share - probe, left))
    most, steps = int(training_s / cost.epoch_s), cost.steps
    if most < LEAST_EPOCHS * wanted and not first:
        logger.warning("%s is left out: %d of its %d epochs fit into the %.0f s left", name, most, wanted, left)
        return None
    epochs = min(wanted, max(most, auto_settings.FEWEST_EPOCHS))
    if most < epochs:
        affordable = int((training_s / epochs - cost.validation_s) / cost.step_s)
        if affordable < (least := math.ceil(min(LEAST_STEPS, cost.steps) / epochs)):
            logger.warning(
                "%.0f s of the budget are left after data and baselines, too few for %d epochs of %d steps of %s and "
                "its evaluation: it is trained so long, and the run takes longer",
                left,
                epochs,
                least,
                name,
            )
        steps = min(cost.steps, max(least, affordable))
    seconds = epochs * (steps * cost.step_s + cost.validation_s)
    estimate = f"about {seconds:.0f} s at most; {cost.memory / 1e9:.1f} GB of memory so far"
    some = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    part = f" of the {cost.steps}" if steps < cost.steps else ""
    logger.info("%s: %s of %d%s steps, %s", name, some, steps, part, estimate)
    shortened = {"epoch_steps": steps} if steps < cost.steps else {}
    return Fit({"epochs": epochs, **shortened}, int(of_share / cost.epoch_s))


def _for_training(seconds: float, cost: Cost, baselines_s: float) -> float:
    """Return how many of `seconds` remain for epochs, beside counts and evaluation."""
    reserve = max(RESERVE * seconds, baselines_s / 2)  # counts for a model are searched as those of a baseline are
    return max(0.0, seconds - reserve - 4 * cost.validation_s)


def _cost(params: Params, name: str, folder: Path, out: Path) -> Cost:
    """Return the cost of an epoch of a model, estimated from a few steps on its initial weights."""
    import torch
    from accelerate import Accelerator

    from seqrec.training import cost
    from seqrec.training.checkpoint import load_checkpoint

    return cost.measure(
        load_checkpoint(out / "artifacts" / name / "initial").model,
        sequences.load(folder),
        stage="finetune",
        config=params.section("finetune", model=name),
        filter_seen=params.filters_seen(),
        accelerator=Accelerator(cpu=not torch.cuda.is_available()),
    )
