"""Step `model_settings`: no stage; the settings of one model, so that its steps depend on no other's."""

from kfp import dsl

from seqrec.components.image import IMAGE


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
    """Look up the settings of a model."""
    from seqrec.cluster.form import settings_of_model, write_parameters

    form = {"dataset": dataset, "models": models, "protocol": protocol, "epochs": epochs, "seed": seed}
    values = settings_of_model(params, model, {**form, "overrides": overrides})
    places = {"architecture": architecture, "pretrain": pretrain, "finetune": finetune}
    write_parameters(values, {**places, "refit": refit, "evaluate": evaluate, "filter_seen": filter_seen})
