"""The families of models: how each of them is built for a dataset, and what it is pre-trained on.

A family is a function from a `Start` to what `train` takes: the new model, its data, and a `Training`. Models that read
attributes, always or because of their options, belong to `of_attributes`. The base classes of the others, in
models/optional.py, say to which they belong: see `FAMILIES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqrec.artifacts import ITEMS, MODEL_CARD, TOKENIZER
from seqrec.config import ModelConfig, PretrainConfig, parse
from seqrec.counts import item_vectors
from seqrec.data import item_tokens
from seqrec.data.sequences import Sequences, load, ranges, read_items
from seqrec.models import REGISTRY
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.models.optional import ReadsTokens, ReadsVectors, SelfSupervised, Transferable, TwoDomains
from seqrec.training import pretrained
from seqrec.training.auto_settings import resolved_start
from seqrec.training.checkpoint import build
from seqrec.training.tensors import digest
from seqrec.training.train import Training
from seqrec.training.warm_start import warm_start

logger = logging.getLogger(__name__)
Ready = tuple[SequenceModel, Sequences, Training]
Tokens = dict[str, Tensor]  # `Catalogue.tokens`


@dataclass(frozen=True, kw_only=True)
class Start:
    """The settings and data that a new model is built from."""

    architecture: ModelConfig
    training: Training  # its config is the section `pretrain`
    sequences: Sequence[Path]  # folders of the dataset, and of its sources
    tables: Sequence[Path]  # folders of their tables
    champion: Path | None  # folder of a model whose weights are used instead of pre-training

    @property
    def config(self) -> PretrainConfig:
        """The section `pretrain`."""
        assert isinstance(self.training.config, PretrainConfig)
        return self.training.config

    @property
    def known(self) -> type[SequenceModel]:
        """The class of the architecture."""
        return REGISTRY.get(self.architecture.architecture, SequenceModel)  # `build` names the known ones

    @property
    def options(self) -> Any:
        """The options of the architecture."""
        return parse(self.known.Options, self.architecture.options, f"models.{self.training.name}.options")

    @property
    def needs(self) -> frozenset[str]:
        """What the model reads besides items, see `SequenceModel.needs_of`."""
        return frozenset() if self.known is SequenceModel else self.known.needs_of(self.options)

    @property
    def learnt(self) -> slice:
        """The datasets that a `Transferable` model learns from: the sources, or the dataset if it has none."""
        return slice(1, None) if len(self.sequences) > 1 else slice(None)

    def alone(self) -> Start:
        """Return the same without the sources."""
        return replace(self, sequences=self.sequences[:1], tables=self.tables[:1])

    def texts(self) -> list[item_tokens.Texts]:
        """Return the text of the items of each dataset."""
        pairs = zip(self.tables, self.sequences, strict=True)
        return [item_tokens.read_texts(t / ITEMS, read_items(s), self.options.attributes) for t, s in pairs]

    def build(self, data: Sequences, tokens: Tokens | None = None) -> SequenceModel:
        """Return a new model for `data`; its initial values are drawn by the seed."""
        torch.manual_seed(self.config.seed)
        return build(self.architecture, Catalogue(data.num_items, data.num_users, 0, tokens))


def of_items(start: Start) -> Ready:
    """Build a model that knows items by their numbers; it takes the champion's weights if they fit."""
    target = load(start.sequences[0])
    net, training = start.build(target), start.training
    if start.champion is not None and warm_start(net, start.sequences[0], start.champion):
        training = replace(training, config=replace(start.config, epochs=0), content=[digest(net.state_dict())])
        return net, target, training
    return net, target, _with_vectors(net, target, training, start)


def _with_vectors(net: SequenceModel, data: Sequences, training: Training, start: Start) -> Training:
    """Return a `Training` that gives items vectors from counts, if the config says so and no phase trains them."""
    if net.phases("pretrain"):
        return training
    config = resolved_start(start.config, data, asdict(start.options))
    counted = partial(item_vectors.initialise, net, data, config.seed)
    return replace(training, config=config, finish=counted if config.item_vectors == "counts" else None)


def of_two_domains(start: Start) -> Ready:
    """Build a model as `of_items`; without a champion, it is pre-trained on the dataset and its sources.

    Adversarial training has no metric to stop on, so every epoch is run.
    """
    net, target, training = of_items(start)
    if training is not start.training:  # it starts from the champion
        return net, target, training
    assert isinstance(net, TwoDomains)
    parts = [load(folder) for folder in start.sequences]
    learnt = train_parts(parts, start.config, validated=False)
    if len(parts) > 1:
        net.add_domain(learnt.num_items - parts[0].num_items)
    epochs = dict.fromkeys(net.phases("pretrain"), start.config.epochs)
    return net, learnt, replace(training, inputs=start.sequences, epochs=epochs, finish=net.drop_domain)


def of_attributes(start: Start) -> Ready:
    """Build a model that reads item attributes; a pre-training phase runs every epoch on the whole training split."""
    start = start.alone()
    tokens = {"values": item_tokens.attribute_values(start.texts()[0], start.options.attribute_values)}
    data = load(start.sequences[0])
    net = start.build(data, tokens)
    if isinstance(net, SelfSupervised):
        data = train_parts([data], start.config, validated=False)
    epochs = dict.fromkeys(net.phases("pretrain"), start.config.epochs)
    training = replace(start.training, content=[digest(tokens)], epochs=epochs)
    return net, data, _with_vectors(net, data, training, start)


def of_vectors(start: Start) -> Ready:
    """Build a model of frozen text vectors."""
    transferable = issubclass(start.known, Transferable)
    start = start if transferable else start.alone()
    place = pretrained.locate(start.options.start, start.training.state / "downloads")
    tokenizer, limit = pretrained.load_tokenizer(place), start.options.attribute_tokens
    vectors = [pretrained.text_vectors(item_tokens.tokenise(text, tokenizer, limit), place) for text in start.texts()]
    tokens = [{"vectors": of_dataset} for of_dataset in vectors]
    if not transferable:
        data = load(start.sequences[0])
        return start.build(data, tokens[0]), data, replace(start.training, content=[digest(tokens[0])])
    joined = torch.cat([vectors[0][:1], *(of_dataset[1:] for of_dataset in vectors[start.learnt])])
    return _transferable(start, tokens, {"vectors": joined})


def of_tokens(start: Start) -> Ready:
    """Build a model that reads the text of items as tokens; its tokeniser is a checkpoint's or newly trained."""
    options, texts = start.options, start.texts()
    place = pretrained.locate(options.start, start.training.state / "downloads") if options.start else ""
    tokenizer = (
        pretrained.load_tokenizer(place)
        if place
        else item_tokens.train_tokenizer(texts[start.learnt], options.vocabulary)
    )
    tokens = [item_tokens.tokenise(text, tokenizer, options.attribute_tokens) for text in texts]
    # the model stores the attributes in order, because text of new items must be read in the same order
    stored = start.architecture.options | {"attributes": [*texts[0]]}
    files = {**start.training.files, TOKENIZER: tokenizer.to_str(pretty=True).encode()}
    start = replace(
        start,
        architecture=replace(start.architecture, options=stored),
        training=replace(start.training, files=files),
    )
    return _transferable(start, tokens, item_tokens.concatenate(tokens[start.learnt]), place)


def _transferable(start: Start, tokens: Sequence[Tokens], joined: Tokens, checkpoint: str = "") -> Ready:
    """Build a model that learns from the datasets `start.learnt` and afterwards serves the first one.

    `tokens` describe the items of each dataset, and `joined` all items to learn from. `checkpoint` names pre-trained
    weights, if there are any.
    """
    parts = [load(folder) for folder in start.sequences]
    served = Catalogue(parts[0].num_items, parts[0].num_users, 0, tokens[0])
    learnt = train_parts(parts[start.learnt], start.config)
    net = start.build(learnt, joined)
    assert isinstance(net, Transferable)
    if checkpoint:
        pretrained.load_weights(net, checkpoint)
    training = replace(
        start.training,
        inputs=start.sequences,
        content=[digest(net.state_dict()), *(digest(of_dataset) for of_dataset in tokens)],
        finish=partial(net.serve, served),
    )
    return net, learnt, training


FAMILIES: Sequence[tuple[type[SequenceModel], Callable[[Start], Ready]]] = (
    (ReadsTokens, of_tokens),
    (ReadsVectors, of_vectors),
    (TwoDomains, of_two_domains),
    (SequenceModel, of_items),
)


def prepared(start: Start) -> Ready:
    """Return the new model, its data and its `Training`, as its family makes them."""
    if start.needs & {"text", "attributes"} and start.champion and (start.champion / MODEL_CARD).is_file():
        logger.warning("the champion is not used: %s reads the text of items, and starts anew", start.training.name)
    if "attributes" in start.needs:
        return of_attributes(start)
    if len(start.sequences) > 1 and issubclass(start.known, Transferable):
        able = start.known.pretrains(start.options)
        if not able or start.config.epochs == 0:
            missing = "pretrain.epochs is 0" if able else "it has no pre-training with encoder: items and refresh: true"
            logger.warning("models.%s: `sources` are not read, because %s", start.training.name, missing)
            start = start.alone()
    return next(family(start) for kind, family in FAMILIES if issubclass(start.known, kind))


def train_parts(parts: Sequence[Sequences], config: PretrainConfig, *, validated: bool = True) -> Sequences:
    """Return the training splits of several datasets as one dataset, with items and users renumbered.

    If `validated`, a random share of the users, drawn by the seed, is held out: they are not trained on, and their last
    event is a validation case.
    """
    length = torch.cat([part.train_stop - part.start for part in parts])
    stop = length.cumsum(0)
    start = stop - length
    able = (length >= 2).nonzero().squeeze(1)
    if validated and len(able) == 1:
        raise ValueError("only one user has two training events, and pre-training holds one out for its validation")
    generator = torch.Generator().manual_seed(config.seed)
    number = max(1, round(len(able) * config.held_out)) if validated else 0
    held = torch.zeros(len(length), dtype=torch.bool)
    held[able[torch.randperm(len(able), generator=generator)[:number]]] = True
    shift = torch.tensor([0, *(part.num_items for part in parts)]).cumsum(0).tolist()
    chosen = [ranges(part.start, part.train_stop - part.start)[1] for part in parts]  # training events
    items = torch.cat([part.items[c] + s for part, c, s in zip(parts, chosen, shift, strict=False)])
    learnt = items[~torch.repeat_interleave(held, length)].long()
    return Sequences(
        items=items,
        times=torch.cat([part.times[c] for part, c in zip(parts, chosen, strict=True)]),
        start=start,
        train_stop=torch.where(held, start, stop),
        valid_start=torch.where(held, start, stop),
        valid_stop=stop,
        stop=stop,
        count=torch.bincount(learnt, minlength=shift[-1] + 1),
        card={"cases": "last"},
    )
