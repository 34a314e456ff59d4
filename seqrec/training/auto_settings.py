"""Settings from the shape of the data: pure functions, each rule with its reason in docs/auto.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from seqrec.data.sequences import Sequences

LENGTHS = (8, 200)  # of the window
BATCHES = (16, 256)
STEPS_AN_EPOCH = 40  # wanted
STEPS = 4_000  # of a training
EPOCHS = (20, 100)
WARMUP_SHARE = 20  # of the steps, one in so many
WARMUP = 100  # steps at most
SPARSE = 10  # events of the median history: below it a log is sparse
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


def number_of_windows(shape: Shape) -> int:
    """Return about how many windows an epoch has."""
    return max(shape.users, shape.events // length(shape)) if windows(shape) == "all" else shape.users


def batch_size(shape: Shape) -> int:
    """Return the power of two that gives about `STEPS_AN_EPOCH` steps."""
    wanted = 2 ** round(math.log2(max(1.0, number_of_windows(shape) / STEPS_AN_EPOCH)))
    return int(min(max(wanted, BATCHES[0]), BATCHES[1]))


def steps_an_epoch(shape: Shape) -> int:
    """Return about how many steps an epoch has."""
    return max(1, round(number_of_windows(shape) / batch_size(shape)))


def epochs(shape: Shape) -> int:
    """Return as many epochs as make about `STEPS` steps."""
    return min(max(math.ceil(STEPS / steps_an_epoch(shape)), EPOCHS[0]), EPOCHS[1])


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


def finetune(shape: Shape, *, number_of_epochs: int | None = None, fast_bf16: bool = False) -> dict[str, Any]:
    """Return the section `finetune`; the epochs may be bounded from outside, the rest follows from them."""
    number = epochs(shape) if number_of_epochs is None else number_of_epochs
    return {
        "epochs": number,
        "batch_size": batch_size(shape),
        "warmup_steps": min(WARMUP, number * steps_an_epoch(shape) // WARMUP_SHARE),
        "patience": max(3, math.ceil(number / 4)),
        "windows": windows(shape),
        "precision": "bf16" if fast_bf16 else "fp32",
        "counts": "auto",
    }


def options(architecture: str, shape: Shape) -> dict[str, Any]:
    """Return the options of flash4rec, sasrec or gru4rec.

    Raises:
        ValueError: there are no rules for the architecture.
    """
    width = d_model(shape)
    shared = {"length": length(shape), "d_model": width, "dropout": dropout(shape)}
    if architecture == "sasrec":
        return shared | {"layers": layers(shape), "heads": 2}
    if architecture == "gru4rec":
        return shared | {"layers": 1, "d_state": 2 * width}
    if architecture == "flash4rec":
        widths = {"d_shared": width, "d_value": 2 * width, "d_expert": 2 * width}
        regular = {"prediction_head": False, "user_dropout": 0.3, "topk_dropout_k": 3}
        return shared | widths | regular | {"layers": layers(shape)}
    raise ValueError(f"no automatic options for {architecture}: there are those of sasrec, gru4rec and flash4rec")


def has_fast_bf16() -> bool:
    """Say whether this machine computes bf16 faster than fp32: a GPU that can, or a CPU with AMX or AVX-512 bf16."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    asked = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(bool(known()) for known in asked if known is not None)
