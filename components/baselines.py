"""Step `baselines`: rows that need no training by gradient, and that any model must beat."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def baselines(
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    results: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Evaluate popularity, a Markov chain, EASE, PCTM and Sequential Rules."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run(
        "baselines",
        sequences=sequences.path,
        reports=f"{results.path}/reports",
        config=config,
        filter_seen=filter_seen,
    )
    results.metadata.update(facts(sequences.path))
    metrics.metadata.update(values)
