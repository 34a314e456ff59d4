"""Step `collect`: no stage; KFP has no input that takes the outputs of several tasks, so results are handed on."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def collect(
    model: str,
    others: dsl.Input[dsl.Artifact],
    checkpoint: dsl.Input[dsl.Model],
    report: dsl.Input[dsl.Artifact],
    results: dsl.Output[dsl.Artifact],
):
    """Add a model's checkpoint and report to those of the others."""
    import shutil

    shutil.copytree(others.path, results.path, dirs_exist_ok=True)
    shutil.copytree(checkpoint.path, f"{results.path}/artifacts/{model}/finetuned")
    shutil.copytree(report.path, f"{results.path}/reports/{model}")
