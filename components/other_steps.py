"""The steps that belong to no stage."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def champion(dataset: str, config: dict, weights: dsl.Output[dsl.Model]):
    """Fetch the champion from the registry; without one the folder holds a note alone."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.config import RegisterConfig, parse
    from seqrec.tracking.registry import fetch_champion

    version = fetch_champion(
        dataset=dataset, folder=Path(weights.path), config=parse(RegisterConfig, config, "register")
    )
    weights.metadata.update(facts(weights.path), version=version)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def collect(dataset: str, state: str, events: dsl.Output[dsl.Dataset], metrics: dsl.Output[dsl.Metrics]):
    """Add what the store of events has received to the log on the volume of states; hand on the whole log."""
    import shutil
    from pathlib import Path

    from seqrec.serving.events import collect

    log = Path(state, "events", f"{dataset}.parquet")
    metrics.metadata.update(new_events=collect(log))
    shutil.copyfile(log, events.path)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def join(
    source: str,
    others: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    sequences: dsl.Input[dsl.Dataset],
    joined: dsl.Output[dsl.Dataset],
):
    """Add a source to the dataset and the sources before it: KFP has no input for the outputs of several tasks."""
    import shutil

    unread = shutil.ignore_patterns("raw", "interactions.parquet", "quarantine.parquet")
    shutil.copytree(others.path, joined.path, ignore=unread, dirs_exist_ok=True)
    shutil.copytree(data.path, f"{joined.path}/sources/{source}", ignore=unread)
    shutil.copytree(sequences.path, f"{joined.path}/sources/{source}/sequences")


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
