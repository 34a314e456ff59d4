"""`seqrec settings`: check everything that a run will read, and write what each stage of dvc.yaml depends on.

DVC compares these files, not params.yaml or code: they hold every setting of a stage, defaults included, the hashes of
the code that it imports, and for ingest those of the user's own files. A stage runs again exactly when one of them
changes, wherever a setting is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from seqrec import ROOT
from seqrec.artifacts import sha256, write_json
from seqrec.code_closure import deciding
from seqrec.config import ConfigError, Params, from_dict, parse

Resolved = dict[str, dict[str, Any]]


def settings(*, output: Path, params: Mapping[str, Any]) -> None:
    """Check the settings of every stage; write the settings of each stage and the hashes of its code to a file.

    Args:
        output: folder to write the files to.
        params: all settings, shaped as params.yaml.

    Raises:
        ConfigError: a setting is wrong; the message names its key.
    """
    read = from_dict(params)
    check(read)
    for name, content in resolve(read).items():
        write_json(output / f"{name}.json", content)


def check(params: Params, *, ingests: bool = True) -> None:
    """Check what `from_dict` cannot, because it needs the packages of the stages: model options, and sources to fetch.

    Raises:
        ConfigError: naming the key.
    """
    for model in params.leaderboard:
        _check_model(params, model)
    for dataset in (params.dataset, *params.sources) if ingests else ():
        from seqrec.data import sources

        config = params.section("ingest", dataset=dataset)
        if dataset in sources.SOURCES and config.source != dataset:
            raise ConfigError(
                f"datasets.{dataset}.ingest.source: {config.source}, but {dataset} is the name of another source; "
                "give the dataset another name, or leave ingest.source out"
            )
        try:
            sources.find(config)
        except ConfigError as error:
            raise ConfigError(f"datasets.{dataset}.{error}") from error


def _check_model(params: Params, name: str) -> None:
    from seqrec.models import REGISTRY

    config = params.model(name)
    if config.architecture not in REGISTRY:
        raise ConfigError(f"models.{name}.architecture: {config.architecture!r} is not one of {', '.join(REGISTRY)}")
    architecture = REGISTRY[config.architecture]
    options = parse(architecture.Options, config.settled, f"models.{name}.options")
    if options.objective not in architecture.objectives:
        known = ", ".join(sorted(architecture.objectives))
        raise ConfigError(f"models.{name}.options.objective: {options.objective} is not one of {known}")


def resolve(params: Params, root: Path = ROOT) -> Resolved:
    """Return for each file, by name, the settings of a stage and the hashes of its code below `root`."""
    from seqrec.models import REGISTRY

    files = _of_data(params, params.dataset, "")
    for source in params.sources:
        files |= _of_data(params, source, f"sources/{source}/")
    modules = {model: REGISTRY.module(params.model(model).architecture) for model in params.leaderboard}
    used = {"register": tuple(modules.values())}  # file -> the modules of the models that the stage computes with
    for model, module in modules.items():
        own = _of_model(params, model)
        files |= own
        used |= dict.fromkeys(own, (module,))
    files["baselines"] = asdict(params.section("evaluate"))
    files["register"] = {"leaderboard": list(params.leaderboard), **asdict(params.section("register"))}
    return {
        name: {"settings": values, "code": _code(PurePath(name).name, used.get(name, ()), root)}
        for name, values in files.items()
    }


def _code(stage: str, models: tuple[str, ...], root: Path) -> dict[str, str]:
    return {path.as_posix(): sha256(root / path) for path in deciding(f"seqrec.stages.{stage}", *models, root=root)}


def _of_data(params: Params, dataset: str, folder: str) -> Resolved:
    from seqrec.data import download, sources

    stages = ("ingest", "validate", "prepare")
    files = {folder + stage: {"dataset": dataset, **asdict(params.section(stage, dataset=dataset))} for stage in stages}
    config = params.section("ingest", dataset=dataset)
    if not config.repository:
        publications = sources.find(config).publications(config)
        files[f"{folder}ingest"]["digests"] = download.digests_of_own_files(publications, config)
    return files


def _of_model(params: Params, model: str) -> Resolved:
    from seqrec.models import REGISTRY

    evaluation = params.section("evaluate")
    filter_seen = {"filter_seen": evaluation.filter_seen}  # validation reads it, not the others
    built = params.model(model)
    building = {
        "sources": list(params.sources),
        "architecture": built.architecture,
        "class": REGISTRY.place(built.architecture),
        "options": dict(sorted(built.options.items())),
    }
    return {
        f"{model}/pretrain": building | filter_seen | asdict(params.section("pretrain", model=model)),
        f"{model}/finetune": filter_seen | asdict(params.section("finetune", model=model)),
        f"{model}/evaluate": asdict(evaluation),
    }
