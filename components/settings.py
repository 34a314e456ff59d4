"""Step `settings`: no stage; the form of a run becomes the settings that the other steps read."""

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
):
    """Resolve and check the settings of a run before anything is fetched or trained."""
    from seqrec.cluster.form import settings_of_run, write_parameters

    form = {"dataset": dataset, "models": models, "protocol": protocol, "epochs": epochs, "seed": seed}
    values = settings_of_run(params, pipeline, source, pipeline_run, {**form, "overrides": overrides})
    places = {"dataset": key, "fresh": fresh, "filter_seen": filter_seen}
    sections = {"ingest": ingest, "validate": validate, "prepare": prepare, "evaluate": evaluate, "register": register}
    write_parameters(values, {**places, **sections})
