"""Step `record`: no stage; what runs last, whatever became of the others."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def record(status: dsl.PipelineTaskFinalStatus, pipeline: str, pipeline_run: str, config: dict, overrides: dict):
    """Record in MLflow how the run ended."""
    from seqrec.cluster.form import overridden
    from seqrec.config import RegisterConfig, parse
    from seqrec.tracking.runs import record_outcome

    record_outcome(
        pipeline=pipeline,
        pipeline_run=pipeline_run,
        state=status.state,
        failure=status.error_message,
        config=parse(RegisterConfig, overridden("register", config, overrides), "register"),
    )
