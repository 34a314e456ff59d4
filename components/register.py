"""Step `register`: leaderboard, MLflow runs, candidate and champion."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    dataset: str,
    pipeline_run: str,
    leaderboard: list,
    filter_seen: bool,
    ingest: dict,
    validate: dict,
    prepare: dict,
    evaluate: dict,
    config: dict,
    results: dsl.Input[dsl.Artifact],
    checkpoints: dsl.Input[list[dsl.Model]],
    evaluations: dsl.Input[list[dsl.Artifact]],
    sequences: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    reports: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Write the leaderboard, log the runs to MLflow, and run the gate of the registry."""
    import shutil
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from seqrec.artifacts import REPORT_PAGE, facts
    from seqrec.cluster.launch import run
    from seqrec.config import SECTIONS, parse

    given = {"ingest": ingest, "validate": validate, "prepare": prepare, "evaluate": evaluate, "register": config}
    settings = {name: asdict(parse(SECTIONS[name], section, name)) for name, section in given.items()}
    shutil.copytree(f"{results.path}/reports", reports.path, dirs_exist_ok=True)
    for report in evaluations:
        shutil.copytree(report.path, f"{reports.path}/{report.metadata['model']}")
    artifacts = Path(tempfile.mkdtemp())
    for checkpoint in checkpoints:
        folder = artifacts / checkpoint.metadata["model"]
        folder.mkdir()
        (folder / "finetuned").symlink_to(checkpoint.path)
    values = run(
        "register",
        leaderboard=leaderboard,
        artifacts=artifacts,
        reports=reports.path,
        sequences=sequences.path,
        data=data.path,
        params={"dataset": dataset, "leaderboard": leaderboard, "filter_seen": filter_seen, **settings},
        config=config,
        pipeline_run=pipeline_run,
    )
    shutil.copyfile(f"{reports.path}/{REPORT_PAGE}", page.path)
    reports.metadata.update(facts(sequences.path))
    metrics.metadata.update(values)
