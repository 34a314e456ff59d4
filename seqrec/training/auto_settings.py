"""Values for settings that are `auto` in params.yaml, from the shape of the data; docs/auto.md gives the reasons."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from seqrec.config import AUTO, FinetuneConfig, ModelConfig, PretrainConfig
from seqrec.config.sections import SWITCHES
from seqrec.data import ties
from seqrec.data.sequences import Sequences
from seqrec.models import REGISTRY, SequenceModel

logger = logging.getLogger(__name__)

LENGTHS = (8, 200)  # shortest and longest window
BATCHES = (16, 256)
STEPS_AN_EPOCH = 40  # target
TARGETS = 5_000  # in a step: more of them in fewer steps learn less in the same time
STEPS = 2_000  # target for a whole training
SHUFFLED = 2  # times as many steps where tied events are shuffled
FULL_SOFTMAX = 5_000  # largest catalogue whose items are all scored for each target
NEGATIVES = 1_024  # items drawn per step for a larger catalogue
SCORES = 150_000_000_000  # maximum for a training: 20 minutes of one core
LAYERS = 5_000  # the layers of a model cost about as much as the scores of so many items
FEWEST_EPOCHS, ENOUGH_EPOCHS, MOST_EPOCHS = 5, 20, 100
WARMUP_SHARE = 20  # one step in 20 is a warm-up step
WARMUP = 100  # maximum number of warm-up steps
RARE = 30  # items are rare if they have fewer events on average
VISITS = 1_200  # a training is short if items are its targets less often on average
WORDS = 32  # most words that are read of an item's text
SPARSE = 10  # a log is sparse if its median history has fewer events
# settings of finetune that have a rule
RULED = (
    *("epochs", "batch_size", "loss", "negatives", "learning_rate", "warmup_steps", "patience", "windows", "precision"),
    *("ties", "sparse_tables"),
)
# learning rates, by architecture
RATES = {"flash4rec": 3e-3} | dict.fromkeys(
    ("sasrec", "ssept", "rec_denoiser", "strec", "hstu", "bert4rec", "gru4rec", "recformer"), 2e-3
)
RATE = 1e-3  # of the other architectures
WORD_RATES = {"flash4rec": 2e-3}  # with words, whose vectors add up in that of an item
ALL_WINDOWS = 1_000_000  # up to this many events, every epoch trains on all of them
WHOLE_TABLE = 50_000  # largest catalogue for which every step updates all rows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The input of the rules; events and histories are those of the training split."""

    users: int  # with a training target
    items: int
    events: int
    median: float  # median length of a history, in events
    ninth: float  # 90 % quantile of that length
    longest: int
    ordered: bool = True  # whether events of the same time follow an order
    described: bool = False  # whether the items have text

    @classmethod
    def of(cls, data: Sequences, *, described: bool = False) -> Shape:
        """Return the shape of a prepared dataset, whose items are `described` by text or not."""
        events = (data.train_stop - data.start)[data.trained()].cpu().double()
        if not len(events):
            raise ValueError("no user has two training events: use longer histories, or another prepare.protocol")
        median, ninth = (float(q) for q in np.quantile(events.numpy(), (0.5, 0.9)))
        return cls(
            users=len(events),
            items=data.num_items,
            events=int(events.sum()),
            median=median,
            ninth=ninth,
            longest=int(events.max()),
            ordered=ties.are_ordered(data),
            described=described,
        )


ANY = Shape(users=1, items=1, events=2, median=2.0, ninth=2.0, longest=2)


def length(shape: Shape) -> int:
    """Return the window length: a multiple of eight, as batches are padded, that fits nine of ten histories."""
    return int(min(max(8 * math.ceil(shape.ninth / 8), LENGTHS[0]), LENGTHS[1]))


def windows(shape: Shape, own: int | str = AUTO) -> str:
    """Return `all` if the log is too small to ignore the events before the last window, else `last`.

    The window has the length `own`, or the one of the rules.
    """
    window = own if isinstance(own, int) else length(shape)
    return "all" if shape.longest > window and shape.events <= ALL_WINDOWS else "last"


def number_of_windows(shape: Shape, of: str) -> int:
    """Return the approximate number of windows of an epoch if `windows` is `of`."""
    return max(shape.users, shape.events // length(shape)) if of == "all" else shape.users


def batch_size(shape: Shape, of: str) -> int:
    """Return the power of two that gives about `STEPS_AN_EPOCH` steps, or more steps of about `TARGETS` targets."""
    number = number_of_windows(shape, of)
    wanted = min(number / STEPS_AN_EPOCH, TARGETS * number / max(1, targets_an_epoch(shape, of)))
    return int(min(max(2 ** round(math.log2(max(1.0, wanted))), BATCHES[0]), BATCHES[1]))


def steps_an_epoch(shape: Shape, of: str, batch: int) -> int:
    """Return the approximate number of steps of an epoch in batches of size `batch`."""
    return max(1, round(number_of_windows(shape, of) / batch))


def targets_an_epoch(shape: Shape, of: str) -> int:
    """Return the approximate number of targets of an epoch if `windows` is `of`."""
    return shape.events if of == "all" else min(shape.events, shape.users * length(shape))


def number_of_targets(shape: Shape, settings: Mapping[str, Any]) -> float:
    """Return the approximate number of targets of a training with these `settings` of finetune."""
    whole = steps_an_epoch(shape, settings["windows"], settings["batch_size"])
    epochs = settings["epochs"] * min(1.0, (settings.get("epoch_steps") or whole) / whole)
    return float(epochs * targets_an_epoch(shape, settings["windows"]))


def loss(shape: Shape) -> str:
    """Return the full softmax, or for a large catalogue the sampled one, whose epochs are several times faster."""
    return "ce" if shape.items <= FULL_SOFTMAX else "sampled_ce"


def epochs(shape: Shape, of: str, steps: int, scored: int, *, shuffled: bool = False, share: float = 1.0) -> int:
    """Return the number of epochs that makes about `STEPS` steps, and at most about `SCORES` scores.

    An epoch takes `steps` steps and visits a `share` of the windows; `scored` items are scored for each target.
    """
    wanted = max(ENOUGH_EPOCHS, math.ceil(STEPS / steps)) * (SHUFFLED if shuffled else 1)
    affordable = int(SCORES / max(1, share * targets_an_epoch(shape, of) * (scored + LAYERS)))
    return min(wanted, max(FEWEST_EPOCHS, affordable), MOST_EPOCHS)


def dropout(shape: Shape) -> float:
    """Return the dropout rate, which falls with the number of events and is higher for short histories."""
    base = 0.4 if shape.events < 200_000 else 0.3 if shape.events < 2_000_000 else 0.2
    return round(base + 0.1 * (shape.median < SPARSE), 2)


def d_model(shape: Shape) -> int:
    """Return the model width, which grows with the number of events."""
    return 32 if shape.events < 20_000 else 64 if shape.events < 5_000_000 else 128


def layers(shape: Shape) -> int:
    """Return one layer for short histories or few events, else two."""
    return 1 if shape.events < 50_000 or shape.median < SPARSE else 2


def finetune(
    shape: Shape, given: Mapping[str, Any], architecture: str = "", options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the training settings of a model: those in `given` unchanged, the others by the rules."""
    values = {name: value for name, value in given.items() if value != AUTO}
    of = values.setdefault("windows", windows(shape, (options or {}).get("length", AUTO)))
    batch = values.setdefault("batch_size", batch_size(shape, of))
    whole = steps_an_epoch(shape, of, batch)
    steps = min(whole, values.get("epoch_steps") or whole)
    kind = values.setdefault("loss", loss(shape))  # the full softmax draws no negatives
    negatives = values.setdefault("negatives", FinetuneConfig.negatives if kind == "ce" else NEGATIVES)
    shuffles = values.get("resident", True) and not shape.ordered  # which needs all events in memory
    order = values.setdefault("ties", "shuffle" if shuffles else "keep")
    scored = shape.items if kind == "ce" else negatives
    shuffled = order == "shuffle"
    number = values.setdefault("epochs", epochs(shape, of, steps, scored, shuffled=shuffled, share=steps / whole))
    rules = {
        "warmup_steps": min(WARMUP, number * steps // WARMUP_SHARE),
        "patience": max(5, math.ceil(number / 4)),
        "precision": "bf16" if has_fast_bf16() else "fp32",
        "learning_rate": learning_rate(architecture, options or {}),
        "sparse_tables": kind != "ce" and not values.get("weight_decay") and sparse_tables(architecture, shape),
    }
    return rules | values


def learning_rate(architecture: str, options: Mapping[str, Any]) -> float:
    """Return the maximum of the learning rate for `architecture` with `options`."""
    if options.get("encoder") == "text":  # recformer's, which may be pre-trained
        return RATE
    rates = RATES | (WORD_RATES if options.get("attribute_values") else {})
    return rates.get(architecture, RATE)


def sparse_tables(architecture: str, shape: Shape) -> bool:
    """Return whether the rows that a step does not read are so many that updating them would take most of its time.

    A GPU updates millions of rows in milliseconds.
    """
    reads_rows = REGISTRY.get(architecture, SequenceModel).reads_rows()
    return reads_rows and shape.items > WHOLE_TABLE and not torch.cuda.is_available()


def resolved(config: FinetuneConfig, shape: Shape, architecture: str, options: Mapping[str, Any]) -> FinetuneConfig:
    """Return `config` of a model with every `auto` replaced by a value; the values are logged."""
    names = [name for name, value in vars(config).items() if value == AUTO and name != "counts"]
    if not names:
        return config
    given = {name: getattr(config, name) for name in (*RULED, "resident", "epoch_steps", "weight_decay")}
    found = finetune(shape, given, architecture, options)
    chosen = {name: found[name] for name in names}
    hidden = {"negatives": found["loss"] != "sampled_ce", "sparse_tables": not found["sparse_tables"]}
    shown = {name: value for name, value in chosen.items() if not hidden.get(name)}
    logger.info("settings of finetune, chosen from the shape of the data: %s", _listed(shown))
    return replace(config, **chosen)


def resolved_start(config: PretrainConfig, data: Sequences, options: Mapping[str, Any]) -> PretrainConfig:
    """Return `config` with a value in place of `item_vectors: auto`; the value is logged."""
    if config.item_vectors != AUTO:
        return config
    start = item_vectors(Shape.of(data), options)
    logger.info("pretrain.item_vectors, chosen from the shape of the data: %s", start)
    return replace(config, item_vectors=start)


def item_vectors(shape: Shape, options: Mapping[str, Any], targets: float = math.inf) -> Literal["random", "counts"]:
    """Return `counts` if items are rare or a training on so many `targets` is short, and no words teach the same."""
    learns = not has_rare_items(shape) and targets >= VISITS * shape.items
    return "random" if options.get("attribute_values") or learns else "counts"


def has_rare_items(shape: Shape) -> bool:
    """Return whether there are too few events to learn each item's vector."""
    return shape.events < RARE * shape.items


def resolved_options(config: ModelConfig, shape: Shape, path: str) -> ModelConfig:
    """Return `config` with every option that is `auto` replaced by a value; the values are logged under `path`."""
    found = options(config.architecture, shape)
    chosen = {name: found[name] for name, value in config.options.items() if value == AUTO and name in found}
    if not chosen:
        return config
    given = {name: value for name, value in config.options.items() if name not in chosen}
    settled = merged(chosen, given, path)
    shown = {name: value for name, value in settled.items() if name in chosen}
    logger.info("%s, chosen from the shape of the data: %s", path, _listed(shown))
    return replace(config, options=settled)


def settled(config: ModelConfig) -> dict[str, Any]:
    """Return the options without those that the rules set, and those that have an effect only if these are on."""
    rules = options(config.architecture, ANY)
    ruled = {name for name, value in config.options.items() if value == AUTO and name in rules}
    switched = {name for switch in ruled for name in SWITCHES.get(switch, ())}
    return {name: value for name, value in config.options.items() if name not in ruled | switched}


def merged(ruled: Mapping[str, Any], given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the options `ruled` by the rules and those `given`, which win.

    What has no effect because its switch is off is left out, with a warning if it was given. If the switch was given,
    too, it stays, and the model's `Options` refuses it.
    """
    both = {**ruled, **given}
    for switch, names in SWITCHES.items():
        if both.get(switch, True):
            continue
        unused = [name for name in names if name in both and not {name, switch} <= given.keys()]
        if named := [name for name in unused if given.get(name)]:
            logger.warning("%s: %s: no effect, as %s is off", path, ", ".join(named), switch)
        both = {name: value for name, value in both.items() if name not in unused}
    return both


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def options(architecture: str, shape: Shape) -> dict[str, Any]:
    """Return the options of `architecture` that the rules set."""
    width, own = d_model(shape), {field.name for field in fields(REGISTRY.get(architecture, SequenceModel).Options)}
    shared = {"length": length(shape), "d_model": width, "dropout": dropout(shape), "layers": layers(shape)}
    shared = {name: value for name, value in shared.items() if name in own}
    words = {"attribute_values": WORDS if shape.described and has_rare_items(shape) else 0}
    if architecture == "gru4rec":
        return shared | words | {"layers": 1, "d_state": 2 * width}
    if architecture == "sasrec":
        return shared | words
    if architecture == "strec":
        return shared | {"layers": max(2, shared["layers"])}  # the first reads every event, the others a sample
    if architecture == "flash4rec":
        known = shape.median >= SPARSE  # enough events to learn a vector for every user
        users = {"user_gate": known, "user_dropout": 0.3 if known else 0.0}
        return shared | users | words | {"d_shared": width, "d_value": 2 * width, "d_expert": 2 * width}
    return shared


def has_fast_bf16() -> bool:
    """Return whether bf16 is faster than fp32 here: without a GPU, on a CPU with AMX or AVX-512 bf16.

    With batches as small as those of the rules, a GPU waits for the host, which bf16 gives more work.
    """
    if torch.cuda.is_available():
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(bool(check()) for check in checks if check is not None)
