"""Step `warm_start`: stage `pretrain` with a champion, whose input cannot be optional in KFP."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def warm_start(
    model: str,
    state: str,
    place: dict,
    filter_seen: bool,
    sources: list,
    architecture: dict,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    sequences: dsl.Input[dsl.Dataset],
    champion: dsl.Input[dsl.Model],
    initial: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Build a model that starts from the champion where it can, and from its pre-training otherwise."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import ModelConfig, PretrainConfig, parse

    values = run(
        "pretrain",
        place=place,
        state=Path(state),
        model=model,
        sequences=Path(sequences.path),
        initial=Path(initial.path),
        architecture=parse(ModelConfig, architecture, f"models.{model}"),
        filter_seen=filter_seen,
        config=parse(PretrainConfig, config, "pretrain"),
        data=Path(data.path),
        champion=Path(champion.path),
        sources=sources,
    )
    initial.metadata.update(facts(Path(sequences.path), Path(initial.path)))
    log_metrics(metrics, values)
