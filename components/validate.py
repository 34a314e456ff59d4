"""Step `validate`: fails, and the run with it, if a critical rule does."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate(
    dataset: str,
    baseline: str,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    validation: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Check the tables; stop the run if a critical rule fails."""
    import shutil
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import ValidateConfig, parse
    from seqrec.stages.validate import validate

    report = Path(validation.path) / "validation.json"
    values = validate(
        dataset=dataset,
        data=Path(data.path),
        report=report,
        baseline=Path(baseline),
        config=parse(ValidateConfig, config, "validate"),
    )
    validation.metadata.update(facts(Path(data.path)))
    shutil.copyfile(report.with_suffix(".html"), page.path)
    log_metrics(metrics, values)
