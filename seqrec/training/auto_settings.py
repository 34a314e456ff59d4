"""Settings from the shape of the data: what is `auto` in params.yaml. docs/auto.md has the reason of each rule."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from seqrec.config import AUTO, FinetuneConfig, ModelConfig
from seqrec.data.sequences import Sequences

logger = logging.getLogger(__name__)

LENGTHS = (8, 200)  # of the window
BATCHES = (16, 256)
STEPS_AN_EPOCH = 40  # wanted
STEPS = 4_000  # of a training
SCORES = 150_000_000_000  # of a training at most, as every target is scored against every item: 20 minutes of a core
LAYERS = 5_000  # items whose scores cost as much as the layers of a model
FEWEST_EPOCHS, ENOUGH_EPOCHS, MOST_EPOCHS = 5, 20, 100
WARMUP_SHARE = 20  # of the steps, one in so many
WARMUP = 100  # steps at most
SPARSE = 10  # events of the median history: below it a log is sparse
RULED = ("epochs", "batch_size", "warmup_steps", "patience", "windows", "precision")  # of finetune
ALL_WINDOWS = 1_000_000  # events up to which every one of them is trained on in every epoch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the rules look at; events and histories are those of the training part."""

    users: int  # with a target in training
    items: int
    events: int
    median: float  # events of a history
    ninth: float  # 90 % quantile of them
    longest: int

    @classmethod
    def of(cls, data: Sequences) -> Shape:
        """Return the shape of a prepared dataset."""
        events = (data.train_stop - data.start)[data.trained()].cpu().double()
        if not len(events):
            raise ValueError("no user has two training events: lower prepare.min_user_events or use a larger dataset")
        median, ninth = (float(events.quantile(q)) for q in (0.5, 0.9))
        return cls(
            users=len(events),
            items=data.num_items,
            events=int(events.sum()),
            median=median,
            ninth=ninth,
            longest=int(events.max()),
        )


def length(shape: Shape) -> int:
    """Return the window: nine of ten histories fit, in steps of eight, as batches are padded."""
    return int(min(max(8 * math.ceil(shape.ninth / 8), LENGTHS[0]), LENGTHS[1]))


def windows(shape: Shape) -> str:
    """Return `all` where the log is too small to leave out what lies before the last window."""
    return "all" if shape.longest > length(shape) and shape.events <= ALL_WINDOWS else "last"


def number_of_windows(shape: Shape, of: str = "") -> int:
    """Return about how many windows an epoch has; `of` is the value of `windows`, if it is not the rule's."""
    return max(shape.users, shape.events // length(shape)) if (of or windows(shape)) == "all" else shape.users


def batch_size(shape: Shape, of: str = "") -> int:
    """Return the power of two that gives about `STEPS_AN_EPOCH` steps."""
    wanted = 2 ** round(math.log2(max(1.0, number_of_windows(shape, of) / STEPS_AN_EPOCH)))
    return int(min(max(wanted, BATCHES[0]), BATCHES[1]))


def steps_an_epoch(shape: Shape, of: str = "", batch: int = 0) -> int:
    """Return about how many steps an epoch has; `batch` is the size of a batch, if it is not the rule's."""
    return max(1, round(number_of_windows(shape, of) / (batch or batch_size(shape, of))))


def targets_an_epoch(shape: Shape, of: str = "") -> int:
    """Return about how many items an epoch predicts; `of` is the value of `windows`, if it is not the rule's."""
    return shape.events if (of or windows(shape)) == "all" else min(shape.events, shape.users * length(shape))


def epochs(shape: Shape, steps: int = 0, of: str = "") -> int:
    """Return as many epochs as make about `STEPS` steps, but no more than `SCORES` scores.

    Args:
        shape: of the data.
        steps: of an epoch, if they are not the rule's.
        of: the value of `windows`, if it is not the rule's.
    """
    wanted = max(ENOUGH_EPOCHS, math.ceil(STEPS / (steps or steps_an_epoch(shape, of))))
    affordable = SCORES // max(1, targets_an_epoch(shape, of) * (shape.items + LAYERS))
    return min(wanted, max(FEWEST_EPOCHS, affordable), MOST_EPOCHS)


def dropout(shape: Shape) -> float:
    """Return less of it the more events there are, more where histories are short."""
    base = 0.4 if shape.events < 200_000 else 0.3 if shape.events < 2_000_000 else 0.2
    return round(base + 0.1 * (shape.median < SPARSE), 2)


def d_model(shape: Shape) -> int:
    """Return the width: it grows with the events there are to learn from."""
    return 32 if shape.events < 20_000 else 64 if shape.events < 5_000_000 else 128


def layers(shape: Shape) -> int:
    """Return one layer where histories are short or events few, else two."""
    return 1 if shape.events < 50_000 or shape.median < SPARSE else 2


def finetune(shape: Shape, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of the training that follow from the shape, and from those that are `given`."""
    values = {name: value for name, value in (given or {}).items() if value != AUTO}
    of = values.setdefault("windows", windows(shape))
    batch = values.setdefault("batch_size", batch_size(shape, of))
    steps = steps_an_epoch(shape, of, batch)
    number = values.setdefault("epochs", epochs(shape, steps, of))
    rules = {
        "warmup_steps": min(WARMUP, number * steps // WARMUP_SHARE),
        "patience": max(3, math.ceil(number / 4)),
        "precision": "bf16" if has_fast_bf16() else "fp32",
    }
    return rules | values


def resolved(config: FinetuneConfig, shape: Shape) -> FinetuneConfig:
    """Return `config` with numbers in place of `auto`; they are logged."""
    names = [name for name, value in vars(config).items() if value == AUTO and name != "counts"]
    if not names:
        return config
    found = finetune(shape, {name: getattr(config, name) for name in RULED})
    chosen = {name: found[name] for name in names}
    logger.info("finetune, from the shape of the data: %s", _listed(chosen))
    return replace(config, **chosen)


def resolved_options(config: ModelConfig, shape: Shape, path: str) -> ModelConfig:
    """Return `config` with numbers in place of the options that are `auto`; they are logged under `path`."""
    found = options(config.architecture, shape)
    chosen = {name: found[name] for name, value in config.options.items() if value == AUTO and name in found}
    if not chosen:
        return config
    logger.info("%s, from the shape of the data: %s", path, _listed(chosen))
    return replace(config, options={**config.options, **chosen})


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def options(architecture: str, shape: Shape) -> dict[str, Any]:
    """Return the options of `architecture` that follow from the shape."""
    width = d_model(shape)
    shared = {"length": length(shape), "d_model": width, "dropout": dropout(shape), "layers": layers(shape)}
    if architecture == "gru4rec":
        return shared | {"layers": 1, "d_state": 2 * width}
    if architecture == "flash4rec":
        known = shape.median >= SPARSE  # by enough events to learn a vector for every user
        users = {"user_gate": known, "user_dropout": 0.3 if known else 0.0}
        return shared | users | {"d_shared": width, "d_value": 2 * width, "d_expert": 2 * width}
    return shared


def has_fast_bf16() -> bool:
    """Say whether this machine computes bf16 faster than fp32: a GPU that can, or a CPU with AMX or AVX-512 bf16."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    asked = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(bool(known()) for known in asked if known is not None)
