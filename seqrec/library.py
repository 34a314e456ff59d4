"""The library: a dataset from a frame, a trained model, its figures and its recommendations.

It calls the stages of the pipeline, which keep their tables and weights in folders, so that every figure is that of
`seqrec run` with the same settings.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
from rich.console import Console

from seqrec import config, locks
from seqrec.artifacts import ITEMS, LEFT_OUT, METRICS, MODEL_CARD, SPLIT_CARD, explained, read_json, sha256, write_text
from seqrec.commands import auto, auto_data, run
from seqrec.commands.auto_plan import Plan, refuse_others
from seqrec.commands.auto_training import model_settings, train
from seqrec.commands.recommend import score_with
from seqrec.commands.settings import check, model_of
from seqrec.config import FinetuneConfig, Params, PretrainConfig
from seqrec.config.checks import check_value
from seqrec.config.ranges import Count, Minutes, Positive
from seqrec.data import sequences
from seqrec.models import REGISTRY
from seqrec.models.optional import SelfSupervised
from seqrec.pipeline import BASELINES, BY_NAME
from seqrec.serving.recommender import POPULARITY, Recommender, Request, located
from seqrec.serving.rules import Attributes
from seqrec.training.auto_settings import Shape
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.saved import models_of_run

if TYPE_CHECKING:  # taken from the extra `validation`
    import polars as pl

OF_DATA = ("dataset", "datasets", "sources", "ingest", "validate", "prepare")  # settings of the tables
EVENTS, PLAN = "events.parquet", "fit.json"
logger = logging.getLogger(__name__)
TRAINING = threading.Lock()  # all threads share torch's random state, so that two trainings at once would change it
ARGUMENTS = {  # flag of `seqrec auto` -> argument here
    **{f"--{name}": f"{name}=" for name in ("user", "item", "title", "items", "time")},
    "--time-format": "time_format=",
    "--out": "folder=",
}


class Dataset:
    """A log that was read, checked and split: `from_frame`, or `from_params` for settings as in params.yaml.

    Its tables lie in `folder`. A temporary folder lives as long as the object, or a model that was trained on it.
    """

    def __init__(self, folder: Path, params: Params, split: str = "", keep: Any = None) -> None:
        self.folder, self.params, self.split, self._keep = folder, params, split, keep

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        user: str | int = "",
        item: str | int = "",
        time: str | int = "",
        title: str | int = "",
        time_format: str = "",
        items: Any = None,
        max_cases: int = 0,
        folder: str | Path | None = None,
    ) -> Dataset:
        """Read, check and split a log of events, one a row; columns and split are chosen as by `seqrec auto`.

        Args:
            frame: a frame of polars, pandas or Arrow.
            user: column of the users, if the guess is wrong.
            item: column of the items.
            time: column of the times.
            title: column of the items' titles.
            time_format: format of the times for strptime, such as %d/%m/%Y.
            items: frame of items with their titles.
            max_cases: random cases to rank, of validation and of test each, for a large log; 0: all.
            folder: folder that receives the tables; by default a temporary one.

        Raises:
            ValueError: the log cannot be read or split, or `folder` holds another one.
        """
        max_cases = _plain(max_cases)
        check_value("max_cases", Count, max_cases)
        place, keep = _working(folder)
        columns = {"user_id": user, "item_id": item, "timestamp": time, "title": title}
        named = {name: str(column) for name, column in columns.items() if column not in (None, "")}
        about: dict[str, Any] = {"columns": named}
        with _held(place, temporary=keep is not None):
            _refuse_others(place, auto.PLAN)
            files = {EVENTS: frame} | ({} if items is None else {ITEMS: items})
            written = {name: place / f"{name}.new" for name in files}
            try:
                for name, path in written.items():
                    _write(files[name], path)
                about |= {"sha256": [sha256(path) for path in written.values()], "time_format": time_format}
                about |= {"data": str(place / EVENTS), "items": "" if items is None else str(place / ITEMS)}
                plan = Plan.load(place / auto.PLAN, about | {"minutes": 0.0, "max_cases": max_cases})
                plan.save()
                for name, path in written.items():
                    path.replace(place / name)
            finally:  # unreadable, or of another log, which the folder does not take
                for path in written.values():
                    path.unlink(missing_ok=True)
            if "data" not in plan.done:
                auto_data.prepare(plan, place, Console(quiet=True))
            made = cls(place, config.from_dict(plan.params), plan.split, keep)
            auto_data.say_data(plan, made.sequences, place)
        return made

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | str | Path, *, folder: str | Path | None = None) -> Dataset:
        """Read, check and split the dataset of settings such as params.yaml, as the stages of the pipeline do.

        Args:
            params: the settings, or the file that holds them. `fit` follows them for the models that they name.
            folder: folder that receives the tables; by default a temporary one.

        Raises:
            ValueError: a setting is wrong, the data cannot be read, or `folder` holds another dataset.
        """
        read = config.from_dict(params) if isinstance(params, Mapping) else config.load(Path(params))
        check(read)
        place, keep = _working(folder)
        settings = {name: value for name, value in read.as_dict().items() if name in OF_DATA}
        with _held(place):
            _refuse_others(place, auto.PLAN)
            plan = Plan.load(place / auto.PLAN, {"settings": json.loads(json.dumps(settings)), "minutes": 0.0})
            run.prepare_data(read, place)
            plan.done = ["data"]
            plan.save()
        made = cls(place, read, keep=keep)
        made.split = str(made.card["protocol"])
        return made

    @property
    def tables(self) -> Path:
        """The folder of the split tables: `sequences` of the stages."""
        return self.folder / "data" / "sequences"

    @property
    def card(self) -> dict[str, Any]:
        """Protocol, counts and digest of the split."""
        return read_json(self.tables / SPLIT_CARD)

    @property
    def sequences(self) -> sequences.Sequences:
        """The histories as tensors."""
        return sequences.load(self.tables)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the log by our names of them; empty where these are the names."""
        return dict(self.params.section("ingest").columns)

    def __repr__(self) -> str:
        """Return the counts, the columns and the split."""
        counts = ", ".join(f"{self.card['counts'][name]:,} {name}" for name in ("users", "items", "events"))
        columns = "".join(f"; {name}: {column}" for name, column in self.columns.items())
        return f"<seqrec.Dataset: {counts}{columns}; split {self.split}>"


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model, named as in metrics.json."""

    model: str
    metrics: Mapping[str, float]

    def table(self, split: str = "test") -> pl.DataFrame:
        """Return a row for each metric of `split`, test or valid: its value, and the 95 % interval if it has one."""
        import polars as pl

        check_value("split", Literal["test", "valid"], split)
        names = [name for name in self.metrics if name.startswith(f"{split}/")]
        names = [name for name in names if not name.endswith(("/low", "/high"))]
        rows = [[self.metrics.get(f"{name}{end}") for end in ("", "/low", "/high")] for name in names]
        schema = {"metric": pl.String, "value": pl.Float64, "low": pl.Float64, "high": pl.Float64}
        found = [(name.removeprefix(f"{split}/"), *row) for name, row in zip(names, rows, strict=True)]
        return pl.DataFrame(found, schema=schema, orient="row")

    def __repr__(self) -> str:
        """Return the main metric with its interval."""
        value, low, high = (self.metrics[f"test/ndcg@10{end}"] for end in ("", "/low", "/high"))
        return f"<seqrec.Evaluation of {self.model}: test NDCG@10 {value:.4f} [{low:.4f}, {high:.4f}]>"


class Model:
    """A trained model: its figures, its recommendations, and the folder of its weights."""

    def __init__(
        self, folder: Path, data: Dataset | None = None, reports: Path | None = None, keep: Any = None
    ) -> None:
        self.folder, self.data, self._reports, self._keep = folder, data, reports, keep
        self.checkpoint = load_checkpoint(folder)
        self.card = self.checkpoint.card
        self.name = str(self.card["model"])

    @cached_property
    def recommender(self) -> Recommender:
        """The model as the service answers with it: rules, similar items, several requests at once.

        Rules may name the attributes in the table of items of its dataset, if both are known.
        """
        recommender = Recommender.from_checkpoint(self.checkpoint)
        if self.data is not None and (items := self.data.folder / "data" / ITEMS).is_file():
            recommender.attributes = Attributes.read(items, recommender.item_ids)
        return recommender

    def evaluate(self, data: Dataset | None = None) -> Evaluation:
        """Return the figures of the stage evaluate.

        Args:
            data: the dataset that the model was trained on; needed after `load` alone.

        Raises:
            ValueError: no dataset is known, or the model was trained on another one.
        """
        if self._reports is not None and (data is None or data is self.data):
            return Evaluation(self.name, read_json(self._reports / METRICS))
        data = self._dataset(data)
        with tempfile.TemporaryDirectory(prefix="seqrec-") as folder:
            places = {"sequences": data.tables, "checkpoint": self.folder, "report": Path(folder) / "report"}
            BY_NAME["evaluate"](data.params, Path(folder), self.name, **places)
            return Evaluation(self.name, read_json(Path(folder) / "report" / METRICS))

    def recommend(self, history: Sequence[Any], k: int = 10, *, explain: bool = False, **wanted: Any) -> pl.DataFrame:
        """Return the best items after a history: item, title, score, best first.

        Args:
            history: item ids, oldest first; unknown ones are skipped. An id may be a number, also in user, exclude and
                allow: 5 and 5.0 are the id "5".
            k: number of items.
            explain: add the column `because`: each event, and by how much the score drops when it is left out.
            wanted: other fields of `seqrec.serving.recommender.Request`, such as user, exclude or diversity.

        Raises:
            ValueError: a field is wrong.
        """
        import polars as pl

        for name in ("exclude", "allow"):
            if wanted.get(name) is not None:
                wanted[name] = _ids(wanted[name], name)
        if wanted.get("times") is not None:
            wanted["times"] = _seconds(wanted["times"])
        if wanted.get("user") is not None:
            wanted["user"] = _ids([wanted["user"]], "user")[0]
        if isinstance(history, set | frozenset):
            raise ValueError("history: expected a list of ids, oldest first, not a set, which has no order")
        k = k.__index__() if isinstance(k, SupportsIndex) else k  # of numpy
        request = config.parse(Request, {**wanted, "history": _ids(history, "history"), "k": k}, "")
        answer = self.recommender.answer([request])[0]
        known = len(request.history) - answer.unknown
        said = [f"the model knows {known} of {len(request.history)} events"] if answer.unknown else []
        if said := [*said, *answer.notes]:
            logger.warning("; ".join(said))
        columns = {"item": answer.items, "title": answer.titles, "score": answer.scores}
        table = pl.DataFrame(columns, schema={"item": pl.String, "title": pl.String, "score": pl.Float64})
        if not explain:
            return table
        because = []
        for item in answer.items:
            no_model = answer.source == POPULARITY
            drops = [0.0] * len(request.history) if no_model else self.recommender.explain(request, item)
            because.append([{"event": e, "drop": d} for e, d in zip(request.history, drops, strict=True)])
        kind = pl.List(pl.Struct({"event": pl.String, "drop": pl.Float64}))
        return table.with_columns(pl.Series("because", because, dtype=kind))

    def recommend_all(self, data: Dataset | None = None, k: int = 10) -> pl.DataFrame:
        """Return the best items of every user after all of the user's events: user_id, items, scores.

        Args:
            data: the dataset that the model was trained on; needed after `load` alone.
            k: number of items.

        Raises:
            ValueError: no dataset is known, or it has another catalogue; `k` is not a number of items.
        """
        import polars as pl

        k = _plain(k)
        check_value("k", Positive, k)
        with tempfile.TemporaryDirectory(prefix="seqrec-") as folder:
            output = Path(folder) / "best.parquet"
            score_with(self.checkpoint, self._dataset(data).tables, output, k)
            return pl.read_parquet(output, memory_map=False, glob=False)

    def save(self, folder: str | Path) -> Path:
        """Copy everything that `load` and `seqrec serve --saved` need to a new folder; return it.

        Raises:
            ValueError: the folder holds something else.
        """
        target = Path(folder)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"folder: {target} is not empty: name another one, or remove it")
        shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target

    def _dataset(self, data: Dataset | None) -> Dataset:
        if data is None and self.data is None:
            raise ValueError(f"data: {self.name} was loaded without its dataset: pass it as `data`")
        return _checked(self.data if data is None else data)

    def __repr__(self) -> str:
        """Return name, size and place."""
        return f"<seqrec.Model {self.name}: {self.card['parameters']:,} parameters, in {self.folder}>"


def fit(
    data: Dataset,
    model: str = "flash4rec",
    *,
    minutes: float | None = None,
    options: Mapping[str, Any] | None = None,
    pretrain: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
) -> Model:
    """Train a model, and evaluate it. A terminal or a notebook shows the progress.

    Settings that none of `options`, `pretrain` and `finetune` names follow from the shape of the data, as in
    `seqrec auto`, unless the dataset was made with `from_params` and its settings describe the model.

    Args:
        data: the dataset.
        model: name of an architecture in `seqrec.models.REGISTRY`, key of `models` in the dataset's settings, or a
            baseline: popularity, repeats, markov, ease, pctm or seqrules. A baseline has no settings.
        minutes: budget, from which the number of epochs and of their steps follows. A model that is pre-trained
            needs the number of those epochs in `pretrain`.
        options: options of the model, such as {"d_model": 64}.
        pretrain: settings of the pre-training, where the model has one; for the others, `item_vectors`.
        finetune: settings of the training, such as {"epochs": 20}.
        seed: seed of weights and training; by default the one of the settings, 42.
        folder: folder that receives weights and reports; by default a temporary one, which lives as long as the model.
            The same call with the same folder continues an interrupted training.

    Raises:
        ValueError: a name or setting is wrong, or `folder` holds another training.
    """
    data = _checked(data)
    if model in BASELINES:
        if model in REGISTRY:
            raise ValueError(f"model: {model} is a baseline: register your class under another name")
        changed = {"minutes": minutes, "options": options, "pretrain": pretrain, "finetune": finetune, "seed": seed}
        return _baseline(data, model, [name for name, value in changed.items() if value is not None], folder)
    described = model in data.params.models
    if not described and model not in REGISTRY:
        known = ", ".join((*REGISTRY, *BASELINES))
        own = "seqrec.models.register(NAME, CLASS) adds your own, and Dataset.from_params reads entries of `models`, "
        own += "such as flash4rec_time: flash4rec with options={'request_time': True}"
        raise ValueError(f"model: {model!r} is not one of {known}; {own}")
    if minutes is not None and ("epochs" in (finetune or {}) or described):
        source = f"the dataset's settings, which have {model} under `models`," if described else "finetune"
        raise ValueError(f"minutes: {source} already gives the number of epochs; leave out one of the two")
    minutes, seed, options = map(_plain, (minutes, seed, options))
    if minutes is not None:
        check_value("minutes", Minutes, minutes)
    pretrain = _parsed(PretrainConfig, pretrain, "pretrain")
    finetune = _parsed(FinetuneConfig, finetune, "finetune")
    place, keep = _working(folder)
    params = data.params if seed is None else data.params.with_overrides({"seed": seed})
    content = params.as_dict() | {"models": {}, "leaderboard": [], "tune": {}}  # which names models
    request = {"minutes": minutes, "model": model, "options": options, "pretrain": pretrain, "finetune": finetune}
    request |= {"seed": content["seed"], "split": data.card["split_sha256"]}
    with TRAINING, _held(place):
        _refuse_others(place, PLAN, auto.PLAN)
        plan = Plan.load(place / PLAN, request)
        plan.params = plan.params or content
        plan.ease_items = 0 if minutes is None else auto.affordable_ease(minutes)
        shape = Shape.of(data.sequences, described=auto_data.has_texts(data.tables))
        settings = partial(model_settings, model, shape, options=options, pretrain=pretrain, finetune=finetune)
        if described:
            entry = dict(params.models[model])
            given = {"options": options or {}, "pretrain": pretrain or {}, "finetune": finetune or {}}
            entry |= {name: {**entry[name], **values} for name, values in given.items()}
        else:
            entry = settings({})
            settings = partial(settings, options=entry["options"])  # which have been warned about
        checked = config.from_dict(content | {"models": {model: entry}, "leaderboard": [model]})
        kind, chosen = model_of(checked, model)
        pretrained = issubclass(kind, SelfSupervised) and kind.pretrains(chosen)
        if described:
            plan.set_model(model, entry)
        else:
            check(checked, ingests=False)
            if not shape.described and {"text", "attributes"} & kind.needs_of(chosen):
                raise ValueError(f"model: {model} reads the text of items; pass `items` or `title` to the dataset")
        if minutes is not None and pretrained and "epochs" not in entry["pretrain"]:
            raise ValueError(f"minutes: {model} is pre-trained first: set pretrain={{'epochs': 5}}")
        if not pretrained and (unused := [name for name in pretrain or {} if name != "item_vectors"]):
            raise ValueError(f"pretrain.{unused[0]}: {model} is not pre-trained with these options: leave it out")
        train(plan, model, settings, data.tables, place, share=None if minutes is None else plan.left())
        write_text(place / run.SETTINGS, config.from_dict(plan.params).as_yaml())
    return Model(place / "artifacts" / model / "finetuned", data, place / "reports" / model, keep)


def _baseline(data: Dataset, name: str, changed: Sequence[str], folder: str | Path | None) -> Model:
    if changed:
        raise ValueError(f"{changed[0]}: {name} is a baseline, which has no such setting: leave it out")
    place, keep = _working(folder)
    with _held(place):
        _refuse_others(place, PLAN, auto.PLAN)
        plan = Plan.load(place / PLAN, {"model": name, "split": data.card["split_sha256"]})
        plan.save(name)
        items = data.card["counts"]["items"]
        run.evaluate_baselines(data.params, data.tables, place, names=(name,), ease_items=items)
        write_text(place / run.SETTINGS, data.params.as_yaml())
    saved = place / "artifacts" / name / "finetuned"
    if (reason := saved / LEFT_OUT).is_file():
        raise ValueError(reason.read_text())
    return Model(saved, data, place / "reports" / name, keep)


def load(place: str | Path) -> Model:
    """Open a model that `Model.save` or the pipeline has written.

    Args:
        place: its folder, such as artifacts/NAME/finetuned, or its name in MLflow: models:/NAME@ALIAS.

    Raises:
        ValueError: the folder holds no model, or a damaged one.
        TrackingError: MLflow does not answer, or has no such model.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(located(place))
        if not (folder / MODEL_CARD).is_file():
            found = models_of_run(folder)
            raise ValueError(f"{place} holds no model{found and f': name one of {found}'}")
        return Model(folder, keep=stack.pop_all())


def _refuse_others(place: Path, *plans: str) -> None:
    """Raise ValueError if `place` holds files, but none of `plans`, or a run of `seqrec auto`."""
    refuse_others(place, *plans)
    if (file := place / auto.PLAN).is_file() and read_json(file)["request"].get("minutes"):
        raise ValueError(f"--out: {place} holds a run of `seqrec auto`: name a new folder")


def _working(folder: str | Path | None) -> tuple[Path, Any]:
    """Return a folder to work in, and what keeps it if it is temporary."""
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"folder: {explained(error)}") from error
        return Path(folder).resolve(), None
    temporary = tempfile.TemporaryDirectory(prefix="seqrec-")
    return Path(temporary.name).resolve(), temporary


def _checked(data: Any) -> Dataset:
    if not isinstance(data, Dataset):
        raise ValueError(
            f"data: expected a Dataset, not {type(data).__name__}: Dataset.from_frame makes one of a table"
        )
    return data


def _plain(settings: Any) -> Any:
    """Return a setting, or a mapping of settings, as JSON has them, without tuples, numbers and arrays of numpy."""
    return json.loads(json.dumps(settings, default=lambda value: getattr(value, "tolist", value.__str__)()))


def _parsed(section: type, given: Mapping[str, Any] | None, path: str) -> Any:
    """Return the settings that are `given` as `section` reads them, such as 3 for "3"."""
    parsed: Any = config.parse(section, _plain(given) or {}, path)
    return given and {name: getattr(parsed, name) for name in given}


def _seconds(times: Iterable[Any]) -> list[float]:
    """Return times by their place, which is not the label that a frame of pandas gives them."""
    try:
        return [float(time) for time in times]
    except (TypeError, ValueError) as error:
        raise ValueError(f"times: expected a list of seconds since 1970 (UTC), not {times!r:.80}") from error


def _ids(values: Iterable[Any], name: str) -> list[str]:
    """Return ids in the form that `ingest` reads them in; messages start with `name`."""
    import polars as pl

    from seqrec.data.readers.row_checks import identifier

    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected a list of ids, not {values!r:.40}")
    plain = (value.item() if isinstance(value, torch.Tensor) else value for value in values)
    return identifier(pl.Series([str(value) for value in plain], dtype=pl.String)).to_list()


def _write(frame: Any, path: Path) -> None:
    """Write a frame of any of the known packages to a Parquet file."""
    import narwhals as nw
    import polars as pl
    import pyarrow as pa

    unreadable = (TypeError, ValueError, OverflowError, pa.ArrowException, pl.exceptions.PolarsError)
    try:
        native = nw.from_native(pa.table(frame) if isinstance(frame, pa.RecordBatch) else frame)
    except nw.exceptions.DuplicateError as error:
        raise ValueError(f"frame: give each column its own name ({' '.join(str(error).split())})") from error
    except TypeError as error:
        kind = type(frame).__name__
        raise ValueError(f"frame: expected a table of polars, pandas or Arrow, not {kind}") from error
    try:
        table = native.lazy().collect("polars").to_native()
    except unreadable:  # the message does not name the column
        for name in native.columns:
            try:
                native.select(name).lazy().collect("polars")
            except unreadable as error:
                raise ValueError(f"frame: column {name} cannot be read ({error}): give its values one type") from error
        raise
    if objects := [name for name, kind in table.schema.items() if kind == pl.Object]:
        raise ValueError(f"frame: column {objects[0]} holds objects of Python: make it text, such as with str()")
    table.with_columns(pl.col(pl.Int128).cast(pl.String)).write_parquet(path)


@contextmanager
def _held(place: Path, *, temporary: bool = False) -> Iterator[None]:
    """Lock a folder, and name the arguments of this module in messages about the flags of the command line."""
    try:
        with locks.locked(place / locks.NAME, f"--out {place}"):
            yield
    except ValueError as error:
        text = re.sub(r"--[a-z-]+", lambda match: ARGUMENTS.get(match[0], match[0]), str(error))
        if temporary and str(place) in text:
            text += "\nThe folder was temporary: folder= keeps it"
        if text == str(error):
            raise
        raise ValueError(text) from error
