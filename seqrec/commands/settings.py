"""`seqrec settings`: check everything that a run will read, and write what each stage of dvc.yaml depends on.

DVC compares these files, not params.yaml or code. A stage has two: its parameters, which are all its settings, defaults
included, and for ingest the hashes of the user's own files; and the hashes of the code that it imports. A stage runs
again exactly when one of them changes, wherever a setting is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqrec.artifacts import ROOT, read_json, sha256, write_json
from seqrec.code_closure import deciding
from seqrec.config import ConfigError, Params, from_dict, parse
from seqrec.config.checks import Section
from seqrec.pipeline import BASELINES, BY_NAME, STAGES

if TYPE_CHECKING:
    from seqrec.models import SequenceModel
    from seqrec.models.base import Options

FOLDERS = ("summary", "evaluated", "sources")  # beside those of the models, in reports and in settings
UNREAD = ("params", "experiment")  # arguments of stages that do not decide their results
PROTOCOLS_OF = {  # settings of `prepare` -> the only protocols that read them
    "val_users": ("LOO-full", "LOO-101"),
    "valid_share": ("RATIO-full", "temporal"),
    "test_share": ("RATIO-full", "temporal"),
    "cases": ("temporal",),
    "filter_on": ("temporal",),
}
SAMPLED = ("sampled_ce", "bce", "gbce", "bpr")
LOSSES_OF = {"negatives": SAMPLED, "sampler": SAMPLED, "gbce_t": ("gbce",)}  # the same of `finetune` -> losses
OBJECTIVES_OF = {"mask_probability": ("cloze",), "mask_last_share": ("cloze",), "earliest_target": ("last",)}
logger = logging.getLogger(__name__)


def settings(*, output: Path, params: Mapping[str, Any]) -> None:
    """Check the settings of every stage; write the parameters of each stage and the hashes of its code to files.

    Args:
        output: folder to write the files to.
        params: all settings, shaped as params.yaml.

    Raises:
        ConfigError: a setting is wrong; the message names its key.
    """
    read = from_dict(params)
    check(read)
    check_for_dvc(read)
    for model in unfed(read):
        raise ConfigError(f"leaderboard: {model}{UNFED} (`make repro` leaves it out by itself)")
    for name, content in resolve(read).items():
        write_json(output / f"{name}.json", content)


def forget_edited_files(params: Params, folder: Path) -> None:
    """Remove the parameters of `ingest` if the user's own files have changed since, so that `settings` runs again.

    DVC itself notices only files that it knows of.

    Args:
        params: the settings of the coming run.
        folder: folder of the files that `settings` wrote.
    """
    for dataset in (params.dataset, *params.sources):
        path = folder / f"{BY_NAME['ingest'].settings_file(params, dataset)}.json"
        if path.is_file() and read_json(path)["digests"] != _digests(params, dataset):
            path.unlink()


def check(params: Params, *, ingests: bool = True) -> None:
    """Check what `from_dict` cannot, because it needs the packages of the stages: model options, and sources to fetch.

    A warning names each setting of `prepare` that the protocol does not read, and of `finetune` that the loss or the
    objective does not.

    Raises:
        ConfigError: naming the key.
    """
    for model in params.leaderboard:
        _, options = model_of(params, model)
        finetune = params.section("finetune", model=model)
        for value, readers in ((finetune.loss, LOSSES_OF), (options.objective, OBJECTIVES_OF)):
            _warn_of_unread(f"models.{model}: finetune", finetune, value, readers)
    for dataset in (params.dataset, *params.sources) if ingests else ():
        from seqrec.data import sources

        config = params.section("ingest", dataset=dataset)
        if dataset in sources.SOURCES and config.source != dataset:
            raise ConfigError(
                f"datasets.{dataset}.ingest.source: is {config.source}, but {dataset} is the name of another source; "
                "rename the dataset, or leave ingest.source out"
            )
        try:
            sources.find(config)
        except ConfigError as error:
            raise ConfigError(f"datasets.{dataset}.{error}") from error
        prepare = params.section("prepare", dataset=dataset)
        _warn_of_unread(f"{dataset}: prepare", prepare, prepare.protocol, PROTOCOLS_OF)


def _warn_of_unread(section: str, config: Section, value: str, readers: Mapping[str, tuple[str, ...]]) -> None:
    """Name each setting that is not at its default, although other values than `value` are the only ones to read it."""
    for name, only in readers.items():
        if value not in (*only, "auto") and getattr(config, name) not in ("auto", getattr(type(config), name)):
            logger.warning("%s.%s has no effect with %s, only with %s", section, name, value, " or ".join(only))


def check_for_dvc(params: Params) -> None:
    """Raise ConfigError where the settings cannot be run under DVC."""
    if not params.leaderboard:
        raise ConfigError("leaderboard: names no model; `python -m seqrec run` can do with the baselines alone")
    for dataset in (params.dataset, *params.sources):
        if params.section("ingest", dataset=dataset).events:
            raise ConfigError(
                f"datasets.{dataset}.ingest.events: DVC cannot track the event store; use `seqrec run`, or a pipeline "
                "on Kubeflow"
            )


UNFED = " reads the items' columns, but the dataset has no file of items: set ingest.items, or leave the model out"


def unfed(params: Params) -> list[str]:
    """Return the models of the leaderboard that read descriptions of items, if the dataset has none."""
    from seqrec.data import sources

    if sources.describes_items(params.section("ingest", dataset=params.dataset)):
        return []
    parsed = {name: model_of(params, name) for name in params.leaderboard}
    return [name for name, (kind, options) in parsed.items() if {"text", "attributes"} & kind.needs_of(options)]


def without_unfed(params: Params) -> Params:
    """Return the settings without the models that the dataset cannot feed, after a warning for each.

    Raises:
        ConfigError: no model is left.
    """
    left_out = unfed(params)
    for name in left_out:
        logger.warning("%s is left out: it%s", name, UNFED.partition(":")[0])
    kept = tuple(name for name in params.leaderboard if name not in left_out)
    if left_out and not kept:
        raise ConfigError(f"leaderboard: {', '.join(left_out)}{UNFED}")
    return replace(params, leaderboard=kept)


def model_of(params: Params, name: str) -> tuple[type[SequenceModel], Options]:
    """Check the entry of a model, and return its class and options."""
    import torch

    from seqrec.models import REGISTRY, Catalogue
    from seqrec.models.ensemble import create
    from seqrec.training.auto_settings import settled

    if name in BASELINES:
        raise ConfigError(f"models.{name}: {name} is a baseline, which every run computes: give the model another name")
    if name in FOLDERS:
        raise ConfigError(f"models.{name}: a folder of reports has this name: give the model another one")
    config = params.model(name)
    if config.architecture not in REGISTRY:
        raise ConfigError(f"models.{name}.architecture: {config.architecture!r} is not one of {', '.join(REGISTRY)}")
    architecture = REGISTRY[config.architecture]
    options = parse(architecture.Options, settled(config), f"models.{name}.options")
    objectives = architecture.objectives_of(options)
    if options.objective not in objectives:
        known = ", ".join(sorted(objectives))
        raise ConfigError(f"models.{name}.options.objective: {options.objective} is not one of {known}")
    if options.members > 1:
        words = {"values": torch.zeros(2, 1, dtype=torch.long)}  # as those of a dataset with text
        try:
            create(architecture, options, Catalogue(num_items=1, num_users=1, length=options.length, tokens=words))
        except ValueError as error:
            raise ConfigError(f"models.{name}.options: {error}") from error
    return architecture, options


def resolve(params: Params, root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return the content of each file, by name: the settings of a stage, or the hashes of its code below `root`."""
    from seqrec.data import sources
    from seqrec.models import REGISTRY, UNTRAINED

    modules = {model: REGISTRY.module(params.model(model).architecture) for model in params.leaderboard}
    files: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        for item in stage.items(params):
            settings = {key: _plain(value) for key, value in stage.settings(params, item).items() if key not in UNREAD}
            if stage.name == "ingest":
                published = sources.PUBLISHED.get(settings["config"]["source"])  # none for the user's own files
                settings |= {"digests": _digests(params, item), "published": published}
            if stage.name == "pretrain":
                settings["class"] = REGISTRY.place(params.model(item).architecture)
            used = [UNTRAINED.module(name) for name in UNTRAINED] if stage.name in ("baselines", "register") else []
            used += [modules[item]] if stage.each == "model" else []
            used += modules.values() if stage.name == "register" else ()
            name = stage.settings_file(params, item)
            code = deciding(f"seqrec.stages.{stage.name}", *used, root=root)
            files |= {name: settings, f"{name}.code": {path.as_posix(): sha256(root / path) for path in code}}
    return files


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _digests(params: Params, dataset: str) -> dict[str, str]:
    """Return the hashes of the user's own files that `ingest` reads."""
    from seqrec.data import download, sources

    config = params.section("ingest", dataset=dataset)
    if config.repository:
        return {}
    return download.digests_of_own_files(sources.find(config).publications, config)
