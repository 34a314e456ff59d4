"""The steps of the stages, and the two before them that look up their settings."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def settings(
    params: dict,
    pipeline: str,
    pipeline_run: str,
    source: str,
    dataset: str,
    models: list,
    protocol: str,
    epochs: int,
    seed: int,
    overrides: dict,
    key: dsl.OutputPath(str),
    fresh: dsl.OutputPath(str),
    filter_seen: dsl.OutputPath(bool),
    ingest: dsl.OutputPath(dict),
    validate: dsl.OutputPath(dict),
    prepare: dsl.OutputPath(dict),
    evaluate: dsl.OutputPath(dict),
    register: dsl.OutputPath(dict),
    reference: dsl.OutputPath(dict),
):
    """Resolve and check the settings of a run before anything is fetched; look up what drift is measured against."""
    from seqrec.cluster.form import settings_of_run, write_parameters
    from seqrec.config import RegisterConfig, parse
    from seqrec.tracking.registry import reference_statistics

    form = {"dataset": dataset, "models": models, "protocol": protocol, "epochs": epochs, "seed": seed}
    values = settings_of_run(params, pipeline, source, pipeline_run, {**form, "overrides": overrides})
    tracking = parse(RegisterConfig, values["register"], "register")
    values["reference"] = reference_statistics(dataset=values["dataset"], config=tracking)
    places = {"dataset": key, "fresh": fresh, "filter_seen": filter_seen, "reference": reference}
    sections = {"ingest": ingest, "validate": validate, "prepare": prepare, "evaluate": evaluate, "register": register}
    write_parameters(values, {**places, **sections})


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def model_settings(
    params: dict,
    model: str,
    dataset: str,
    models: list,
    protocol: str,
    epochs: int,
    seed: int,
    overrides: dict,
    architecture: dsl.OutputPath(dict),
    pretrain: dsl.OutputPath(dict),
    finetune: dsl.OutputPath(dict),
    evaluate: dsl.OutputPath(dict),
    refit: dsl.OutputPath(str),
    filter_seen: dsl.OutputPath(bool),
):
    """Look up the settings of one model, so that its steps depend on no other's."""
    from seqrec.cluster.form import settings_of_model, write_parameters

    form = {"dataset": dataset, "models": models, "protocol": protocol, "epochs": epochs, "seed": seed}
    values = settings_of_model(params, model, {**form, "overrides": overrides})
    places = {"architecture": architecture, "pretrain": pretrain, "finetune": finetune}
    write_parameters(values, {**places, "refit": refit, "evaluate": evaluate, "filter_seen": filter_seen})


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def ingest(
    dataset: str,
    state: str,
    fresh: str,
    config: dict,
    data: dsl.Output[dsl.Dataset],
    raw: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    events: dsl.Input[dsl.Dataset] | None = None,
):
    """Fetch a dataset and read it into the canonical tables; another text in `fresh` bypasses KFP's cache.

    The published files are an artifact of their own: no step reads them, so none fetches them.
    """
    import shutil
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, run

    values = run(
        "ingest",
        dataset=dataset,
        output=data.path,
        downloads=f"{state}/downloads",
        config=config,
        events=getattr(events, "path", None),
    )
    Path(data.path, "raw").mkdir(exist_ok=True)  # the tables of a DVC project come without
    shutil.move(f"{data.path}/raw", raw.path)
    data.metadata.update(facts(data.path))
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate(
    dataset: str,
    reference: dict,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    validation: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Check the tables; stop the run if a critical rule fails. `reference` has the registry's reference statistics."""
    import shutil
    import tempfile
    from pathlib import Path

    from seqrec.artifacts import facts, write_json
    from seqrec.cluster.launch import named, run

    report, accepted = f"{validation.path}/validation", Path(tempfile.mkdtemp(), "reference.json")
    write_json(accepted, {dataset: reference})
    values = run(
        "validate", dataset=dataset, data=data.path, report=f"{report}.json", reference=accepted, config=config
    )
    validation.metadata.update(facts(data.path))
    shutil.copyfile(f"{report}.html", page.path)
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(
    dataset: str,
    state: str,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    validation: dsl.Input[dsl.Artifact],
    sequences: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Filter, number, order and split the interactions."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, run

    values = run(
        "prepare",
        state=state,
        dataset=dataset,
        data=data.path,
        validation=f"{validation.path}/validation.json",
        sequences=sequences.path,
        config=config,
    )
    sequences.metadata.update(facts(sequences.path))
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def baselines(
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    results: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Compute and evaluate the baselines: popularity, repeats, markov, ease, pctm and seqrules."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, run

    values = run(
        "baselines",
        sequences=sequences.path,
        data=data.path,
        artifacts=f"{results.path}/artifacts",
        reports=f"{results.path}/reports",
        config=config,
        filter_seen=filter_seen,
    )
    results.metadata.update(facts(sequences.path))
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    model: str,
    state: str,
    filter_seen: bool,
    sources: list,
    architecture: dict,
    config: dict,
    data: dsl.Input[dsl.Dataset],
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    champion: dsl.Input[dsl.Model] | None = None,
):
    """Build a model that starts from the champion, where it can, or from its own pre-training, if it has any."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, run_model

    values = run_model(
        "pretrain",
        state=state,
        model=model,
        sequences=sequences.path,
        initial=initial.path,
        architecture=architecture,
        filter_seen=filter_seen,
        config=config,
        data=data.path,
        champion=getattr(champion, "path", None),
        sources=sources,
    )
    initial.metadata.update(facts(sequences.path, initial.path), model=model)
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    model: str,
    state: str,
    filter_seen: bool,
    refit: str,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Input[dsl.Model],
    checkpoint: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train a model for the next item; resumes by itself."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, run_model

    values = run_model(
        "finetune",
        state=state,
        model=model,
        sequences=sequences.path,
        initial=initial.path,
        checkpoint=checkpoint.path,
        filter_seen=filter_seen,
        refit=refit,
        config=config,
    )
    checkpoint.metadata.update(facts(sequences.path, checkpoint.path), model=model)
    metrics.metadata.update(named(values))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    model: str,
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    checkpoint: dsl.Input[dsl.Model],
    report: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    alone: bool = False,
):
    """Rank every test case among the whole catalogue; where the model stands `alone`, its failure is the run's."""
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import named, require_success, run_model

    values = run_model(
        "evaluate",
        model=model,
        sequences=sequences.path,
        checkpoint=checkpoint.path,
        report=report.path,
        config=config,
        filter_seen=filter_seen,
    )
    if alone:
        require_success(model, report.path)
    report.metadata.update(facts(sequences.path, checkpoint.path), model=model)
    metrics.metadata.update(named(values))


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
    validation: dsl.Input[dsl.Artifact],
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
    from seqrec.cluster.launch import named, run, succeeded
    from seqrec.config import SECTIONS, parse

    given = {"ingest": ingest, "validate": validate, "prepare": prepare, "evaluate": evaluate, "register": config}
    settings = {name: asdict(parse(SECTIONS[name], section, name)) for name, section in given.items()}
    shutil.copytree(f"{results.path}/reports", reports.path, dirs_exist_ok=True)
    shutil.copy(f"{validation.path}/validation.json", reports.path)
    for report in evaluations:
        shutil.copytree(report.path, f"{reports.path}/{report.metadata['model']}")
    leaderboard = succeeded(leaderboard, Path(reports.path))
    artifacts = Path(tempfile.mkdtemp())
    for checkpoint in checkpoints:
        folder = artifacts / checkpoint.metadata["model"]
        folder.mkdir()
        (folder / "finetuned").symlink_to(checkpoint.path)
    for baseline in Path(results.path, "artifacts").iterdir():
        (artifacts / baseline.name).symlink_to(baseline)
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
    metrics.metadata.update(named(values))
