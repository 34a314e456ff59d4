"""Step `prepare`: interactions become numbered, ordered, split sequences."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(
    dataset: str,
    state: str,
    place: dict,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    validation: dsl.Input[dsl.Artifact],
    sequences: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Filter, number, order and split the interactions."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run(
        "prepare",
        place=place,
        state=state,
        dataset=dataset,
        data=data.path,
        validation=f"{validation.path}/validation.json",
        sequences=sequences.path,
        config=config,
    )
    sequences.metadata.update(facts(sequences.path))
    metrics.metadata.update(values)
