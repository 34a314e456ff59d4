"""Step `baselines`: rows that need no training by gradient, and that any model must beat."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def baselines(
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    results: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Compute and evaluate popularity, a Markov chain, EASE, PCTM and Sequential Rules."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import EvaluateConfig, parse
    from seqrec.stages.baselines import baselines

    values = baselines(
        sequences=Path(sequences.path),
        data=Path(data.path),
        artifacts=Path(results.path) / "artifacts",
        reports=Path(results.path) / "reports",
        config=parse(EvaluateConfig, config, "evaluate"),
        filter_seen=filter_seen,
    )
    results.metadata.update(facts(Path(sequences.path)))
    log_metrics(metrics, values)
