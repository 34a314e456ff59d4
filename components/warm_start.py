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
        champion=champion.path,
        sources=sources,
    )
    initial.metadata.update(facts(sequences.path, initial.path))
    metrics.metadata.update(values)
