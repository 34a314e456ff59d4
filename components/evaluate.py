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
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import EvaluateConfig, parse
    from seqrec.stages.evaluate import evaluate

    values = evaluate(
        model=model,
        sequences=Path(sequences.path),
        checkpoint=Path(checkpoint.path),
        report=Path(report.path),
        config=parse(EvaluateConfig, config, "evaluate"),
        filter_seen=filter_seen,
    )
    report.metadata.update(facts(Path(sequences.path), Path(checkpoint.path)))
    log_metrics(metrics, values)
