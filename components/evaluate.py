"""Step `evaluate`: rank every test case among the whole catalogue."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    model: str,
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    checkpoint: dsl.Input[dsl.Model],
    report: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Rank every test case among the whole catalogue."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run(
        "evaluate",
        model=model,
        sequences=sequences.path,
        checkpoint=checkpoint.path,
        report=report.path,
        config=config,
        filter_seen=filter_seen,
    )
    report.metadata.update(facts(sequences.path, checkpoint.path))
    metrics.metadata.update(values)
