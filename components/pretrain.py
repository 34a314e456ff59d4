"""Step `pretrain`: build a model, and run its pre-training phases if it has any."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    model: str,
    state: str,
    place: dict,
    filter_seen: bool,
    sources: list,
    architecture: dict,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Build a model and run its pre-training, if it has any."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run(
        "pretrain",
        place=place,
        state=state,
        model=model,
        sequences=sequences.path,
        initial=initial.path,
        architecture=architecture,
        filter_seen=filter_seen,
        config=config,
        data=data.path,
        sources=sources,
    )
    initial.metadata.update(facts(sequences.path, initial.path))
    metrics.metadata.update(values)
