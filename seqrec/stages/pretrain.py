"""The pretrain stage: builds a model, and runs its pre-training phases if it has any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seqrec.artifacts import ITEMS
from seqrec.config import AUTO, EXPERIMENT, ModelConfig, PretrainConfig
from seqrec.data.sequences import load as load_sequences
from seqrec.data.sequences import read_items
from seqrec.tracking.runs import epoch_log
from seqrec.training import auto_settings, families
from seqrec.training.auto_settings import Shape
from seqrec.training.checkpoint import catalogue_files
from seqrec.training.train import Training, train


def pretrain(
    *,
    model: str,
    sequences: Path,
    data: Path,
    initial: Path,
    state: Path,
    architecture: ModelConfig,
    filter_seen: bool,
    config: PretrainConfig,
    sources: Sequence[str | Path] = (),
    champion: Path | None = None,
    experiment: str = EXPERIMENT,
) -> dict[str, float]:
    """Initialise `model`, pre-train it if its architecture has pre-training phases, and write it to `initial`.

    Args:
        model: key in `models`.
        sequences: folder of the prepared dataset.
        data: folder of the ingested tables, for titles in the model's vocabulary and for text.
        initial: output folder for weights, card, vocabulary, users and history.
        state: folder of resume states.
        architecture: architecture and options.
        filter_seen: whether validation leaves out seen items.
        config: section `pretrain`.
        sources: names of other datasets, whose tables and sequences are in `data`/sources; models that read text
            pre-train only on these datasets, models of two domains also on the dataset itself.
        champion: folder with weights, card, vocabulary and users of a champion; a model of the same architecture and
            options starts from its weights instead of pre-training.
        experiment: name of the MLflow experiment (`register.experiment`), used if MLFLOW_TRACKING_URI is set.
    """
    training = Training(
        name=model,
        stage="pretrain",
        config=config,
        inputs=[sequences],
        output=initial,
        state=state,
        filter_seen=filter_seen,
        open_log=epoch_log(experiment),
        files=catalogue_files(sequences, data / ITEMS),
    )
    if AUTO in architecture.options.values():
        from seqrec.data import item_tokens

        text = item_tokens.described(data / ITEMS, read_items(sequences))
        shape = Shape.of(load_sequences(sequences), described=text)
        architecture = auto_settings.resolved_options(architecture, shape, f"models.{model}.options")
    others = [data / "sources" / name for name in sources] if config.use_sources else []
    start = families.Start(
        architecture=architecture,
        training=training,
        sequences=[sequences, *(source / "sequences" for source in others)],
        tables=[data, *others],
        champion=champion,
    )
    return train(*families.prepared(start))
