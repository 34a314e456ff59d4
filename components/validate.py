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

    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    report = f"{validation.path}/validation"
    values = run("validate", dataset=dataset, data=data.path, report=f"{report}.json", baseline=baseline, config=config)
    validation.metadata.update(facts(data.path))
    shutil.copyfile(f"{report}.html", page.path)
    metrics.metadata.update(values)
