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
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import PrepareConfig, parse

    values = run(
        "prepare",
        place=place,
        state=Path(state),
        dataset=dataset,
        data=Path(data.path),
        validation=Path(validation.path) / "validation.json",
        sequences=Path(sequences.path),
        config=parse(PrepareConfig, config, "prepare"),
    )
    sequences.metadata.update(facts(Path(sequences.path)))
    log_metrics(metrics, values)
