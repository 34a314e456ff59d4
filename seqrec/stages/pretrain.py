"""The pretrain stage: builds a model, and runs its pre-training phases if it has any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqrec.artifacts import ITEMS, TOKENIZER
from seqrec.config import AUTO, EXPERIMENT, ConfigError, ModelConfig, PretrainConfig, parse
from seqrec.data.sequences import Sequences, read_vocabulary
from seqrec.data.sequences import load as load_sequences
from seqrec.models import REGISTRY
from seqrec.models.base import Catalogue, SequenceModel
from seqrec.training import auto_settings
from seqrec.training.auto_settings import Shape
from seqrec.training.cards import catalogue_files
from seqrec.training.checkpoint import build, digest
from seqrec.training.train import Training, train
from seqrec.training.warm_start import warm_start


def pretrain(
    *,
    model: str,
    sequences: Path,
    initial: Path,
    state: Path,
    architecture: ModelConfig,
    filter_seen: bool,
    config: PretrainConfig,
    data: Path | None = None,
    sources: Sequence[str | Path] = (),
    champion: Path | None = None,
    resume: bool = False,
    experiment: str = EXPERIMENT,
) -> dict[str, float]:
    """Initialise `model`, pre-train it if its architecture has pre-training phases, and write it to `initial`.

    Args:
        model: key in `models`.
        sequences: folder of the prepared dataset.
        initial: output folder for weights, card, vocabulary, users and history.
        state: folder of resume states.
        architecture: architecture and options.
        filter_seen: whether validation leaves out seen items.
        config: section `pretrain`.
        data: folder of the ingested tables, for titles in the model's vocabulary and for text.
        sources: names of other datasets, whose tables and sequences lie in `data`/sources; text models pre-train only
            on them, models of two domains on them and the dataset.
        champion: folder with weights, card, vocabulary and users of a champion; a model of the same architecture and
            options starts from its weights instead of pre-training.
        resume: fail instead of starting afresh.
        experiment: name of the MLflow experiment, used if MLFLOW_TRACKING_URI is set; `register.experiment`.
    """
    training = Training(
        name=model,
        stage="pretrain",
        config=config,
        inputs=[sequences],
        output=initial,
        state=state,
        filter_seen=filter_seen,
        resume=resume,
        experiment=experiment,
        files=catalogue_files(sequences, data and data / ITEMS),
    )
    others = [(data or Path()) / "sources" / name for name in sources] if config.use_sources else []
    target = load_sequences(sequences)
    if AUTO in architecture.options.values():
        architecture = auto_settings.resolved_options(architecture, Shape.of(target), f"models.{model}.options")
    known = REGISTRY.get(architecture.architecture)
    if known is not None and known.text:
        if data is None:
            raise ConfigError(f"models.{model}: {known.__name__} reads the items' text: name its folder with --data")
        folders = [(data, sequences), *((source, source / "sequences") for source in others)]
        return _with_text(known, architecture, folders, config, training)
    torch.manual_seed(config.seed)
    net = build(architecture, Catalogue(num_items=target.num_items, num_users=target.num_users, length=0))
    if champion is not None and warm_start(net, sequences, champion):
        training = replace(training, config=replace(config, epochs=0), content=[digest(net.state_dict())])
    elif net.domains:
        return _with_domains(net, [sequences, *(source / "sequences" for source in others)], config, training)
    return train(net, target, training)


def _with_domains(
    net: SequenceModel, folders: Sequence[Path], config: PretrainConfig, training: Training
) -> dict[str, float]:
    """Pre-train on the dataset and its sources; adversarial training has no metric to stop on, so every epoch is run.

    Args:
        net: model of the dataset.
        folders: sequences of the dataset, and of the sources, which make up the second domain.
        config: section `pretrain`.
        training: the training, with the dataset alone.
    """
    parts = [load_sequences(folder) for folder in folders]
    learnt = train_parts(parts, config, validated=False)
    if len(parts) > 1:
        net.add_domain(learnt.num_items - parts[0].num_items)
    epochs = dict.fromkeys(net.phases("pretrain"), config.epochs)
    return train(
        net, learnt, replace(training, inputs=folders, epochs=epochs, finish=lambda trained: trained.drop_domain())
    )


def _with_text(
    known: type[SequenceModel],
    architecture: ModelConfig,
    folders: Sequence[tuple[Path, Path]],
    config: PretrainConfig,
    training: Training,
) -> dict[str, float]:
    """Build and pre-train a model that reads text; `folders` are (tables, sequences) of the dataset and its sources."""
    options = parse(known.Options, architecture.options, f"models.{training.name}.options")
    if known.text == "tokens":
        return _pretrain_on_tokens(architecture, options, folders, config, training)
    if known.text == "attributes":
        return _with_attributes(architecture, options, folders[0], config, training)
    return _embed_text(architecture, options, folders if known.contrastive else folders[:1], config, training)


def _pretrain_on_tokens(
    architecture: ModelConfig,
    options: Any,
    folders: Sequence[tuple[Path, Path]],
    config: PretrainConfig,
    training: Training,
) -> dict[str, float]:
    """Pre-train on all but the first of `folders` (tables, sequences), or on that one if there are no others."""
    from seqrec.data import item_tokens
    from seqrec.training import pretrained

    start = pretrained.locate(options.start, training.state / "downloads") if options.start else ""
    texts = [_texts(folder, options.attributes) for folder in folders]
    read = slice(1, None) if len(folders) > 1 else slice(None)  # with sources, the dataset itself is not used
    tokenizer = (
        pretrained.load_tokenizer(start) if start else item_tokens.train_tokenizer(texts[read], options.vocabulary)
    )
    tokens = [item_tokens.tokenise(text, tokenizer, options.attribute_tokens) for text in texts]
    # the model stores the attributes in order, because text of new items must be read in the same order
    architecture = replace(architecture, options=architecture.options | {"attributes": [*texts[0]]})
    parts = [load_sequences(sequences) for _, sequences in folders]
    served = Catalogue(parts[0].num_items, parts[0].num_users, 0, tokens[0])
    learnt = train_parts(parts[read], config)
    torch.manual_seed(config.seed)
    net = build(architecture, Catalogue(learnt.num_items, learnt.num_users, 0, item_tokens.concatenate(tokens[read])))
    if start:
        pretrained.load_weights(net, start)
    training = replace(
        training,
        inputs=[sequences for _, sequences in folders],
        files={**training.files, TOKENIZER: tokenizer.to_str(pretty=True).encode()},
        content=[digest(net.state_dict()), *(digest(of_dataset) for of_dataset in tokens)],
        finish=lambda trained: trained.serve(served),
    )
    return train(net, learnt, training)


def _texts(folder: tuple[Path, Path], attributes: Sequence[str]) -> Any:
    from seqrec.data import item_tokens

    tables, sequences = folder
    return item_tokens.read_texts(tables / ITEMS, read_vocabulary(sequences)[0], attributes)


def _embed_text(
    architecture: ModelConfig,
    options: Any,
    folders: Sequence[tuple[Path, Path]],
    config: PretrainConfig,
    training: Training,
) -> dict[str, float]:
    """Build a model of frozen text vectors; if it has a pre-training phase, pre-train as `_pretrain_on_tokens`."""
    from seqrec.data import item_tokens
    from seqrec.training import pretrained

    start = pretrained.locate(options.start, training.state / "downloads")
    tokenizer, limit = pretrained.load_tokenizer(start), options.attribute_tokens
    texts = [_texts(folder, options.attributes) for folder in folders]
    vectors = [pretrained.text_vectors(item_tokens.tokenise(text, tokenizer, limit), start) for text in texts]
    parts = [load_sequences(sequences) for _, sequences in folders]
    target = Catalogue(parts[0].num_items, parts[0].num_users, 0, {"vectors": vectors[0]})
    torch.manual_seed(config.seed)
    if not REGISTRY[architecture.architecture].contrastive:
        return train(
            build(architecture, target), parts[0], replace(training, content=[digest({"vectors": vectors[0]})])
        )
    read = slice(1, None) if len(folders) > 1 else slice(None)
    learnt = train_parts(parts[read], config)
    joined = torch.cat([vectors[0][:1], *(of_dataset[1:] for of_dataset in vectors[read])])
    net = build(architecture, Catalogue(learnt.num_items, learnt.num_users, 0, {"vectors": joined}))
    training = replace(
        training,
        inputs=[sequences for _, sequences in folders],
        content=[digest(net.state_dict()), *(digest({"vectors": of_dataset}) for of_dataset in vectors)],
        finish=lambda trained: trained.serve(target),
    )
    return train(net, learnt, training)


def _with_attributes(
    architecture: ModelConfig, options: Any, folder: tuple[Path, Path], config: PretrainConfig, training: Training
) -> dict[str, float]:
    """Build a model that reads item attributes; a pre-training phase runs every epoch on the whole training split."""
    from seqrec.data import item_tokens

    values = item_tokens.attribute_values(_texts(folder, options.attributes), options.attribute_values)
    tokens, target = {"values": values}, load_sequences(folder[1])
    torch.manual_seed(config.seed)
    net = build(architecture, Catalogue(target.num_items, target.num_users, 0, tokens))
    learnt = train_parts([target], config, validated=False) if net.contrastive else target
    epochs = dict.fromkeys(net.phases("pretrain"), config.epochs)
    return train(net, learnt, replace(training, content=[digest(tokens)], epochs=epochs))


def train_parts(parts: Sequence[Sequences], config: PretrainConfig, *, validated: bool = True) -> Sequences:
    """Return the training splits of several datasets as one dataset, with items and users renumbered.

    If `validated`, a random share of the users, drawn by the seed, is held out: they are not trained on, and their last
    event is a validation case.
    """
    length = torch.cat([part.train_stop - part.start for part in parts])
    stop = length.cumsum(0)
    start = stop - length
    able = (length >= 2).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(config.seed)
    number = max(1, round(len(able) * config.held_out)) if validated else 0
    held = torch.zeros(len(length), dtype=torch.bool)
    held[able[torch.randperm(len(able), generator=generator)[:number]]] = True
    shift = torch.tensor([0, *(part.num_items for part in parts)]).cumsum(0).tolist()
    chosen = [_train_events(part) for part in parts]
    items = torch.cat([part.items[c] + s for part, c, s in zip(parts, chosen, shift, strict=False)])
    learnt = items[~torch.repeat_interleave(held, length)].long()
    return Sequences(
        items=items,
        times=torch.cat([part.times[c] for part, c in zip(parts, chosen, strict=True)]),
        start=start,
        train_stop=torch.where(held, start, stop),
        valid_stop=stop,
        stop=stop,
        count=torch.bincount(learnt, minlength=shift[-1] + 1),
        card={"cases": "last"},
    )


def _train_events(part: Sequences) -> Tensor:
    """Return the flat indices of the training events."""
    user = torch.repeat_interleave(torch.arange(part.num_users), part.stop - part.start)
    return (torch.arange(len(part.items)) < part.train_stop[user]).nonzero().squeeze(1)
