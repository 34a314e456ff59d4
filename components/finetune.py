"""Step `finetune`: train a model for the next item."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    model: str,
    state: str,
    place: dict,
    filter_seen: bool,
    refit: str,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Input[dsl.Model],
    checkpoint: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train a model for the next item; resumes by itself."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run(
        "finetune",
        place=place,
        state=state,
        model=model,
        sequences=sequences.path,
        initial=initial.path,
        checkpoint=checkpoint.path,
        filter_seen=filter_seen,
        refit=refit,
        config=config,
    )
    checkpoint.metadata.update(facts(sequences.path, checkpoint.path))
    metrics.metadata.update(values)
