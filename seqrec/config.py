"""The sections of `params.yaml`: frozen, typed, and strict about keys nobody reads.

The sections are plain dataclasses, so that the training core needs no more than torch; `parse` lets pydantic
check and cast the values at the edge (KFP carries every number as a double: `20.0` parses as the integer 20).
A setting is looked up in the shared section, then in the dataset's, then in the model's; the last one wins.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

# on a bare training machine without pydantic, unknown keys and ranges are still checked, types are not cast
CASTS = importlib.util.find_spec("pydantic") is not None
if CASTS:
    import pydantic

STAGES = ("ingest", "validate", "prepare", "pretrain", "finetune", "evaluate", "register")
LOSSES = ("ce", "sampled_ce", "bce", "gbce", "bpr")
EXPERIMENT = "seqrec"  # MLflow's
PROTOCOLS = ("LOO-full", "LOO-101", "RATIO-full", "temporal")
Section = TypeVar("Section")


class ConfigError(ValueError):
    """A setting is missing, misspelt, of the wrong type or out of range; the message names its key."""


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """Section `ingest`: which source is read, and how forgivingly."""

    source: str  # a name of seqrec.data.sources.SOURCES
    category: str = ""  # Amazon: the category as the file names spell it, e.g. Gift_Cards
    interactions: str = ""  # csv: path or URL of the events (CSV or Parquet); prefixes: up to `.train.inter`
    items: str = ""  # csv, prefixes: path or URL of the items file; empty for none
    columns: dict[str, str] = field(default_factory=dict)  # csv: our column -> the file's; items.<column>: there alone
    sha256: dict[str, str] = field(default_factory=dict)  # file's role (interactions, items) -> its digest, if pinned
    mirror: str = ""  # directory or URL tried before the official one; SEQREC_DATA_MIRROR wins
    repository: str = ""  # a DVC project, whose ingested tables are fetched as they are ...
    revision: str = ""  # ... at this commit, tag or branch
    max_bad_share: float = 0.01  # more malformed rows than this fail the stage
    retries: int = 4  # attempts per URL after the first, with exponential backoff
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        require(0.0 <= self.max_bad_share <= 1.0, "max_bad_share must be between 0 and 1")
        require(bool(self.repository) == bool(self.revision), "repository and revision go together")
        require(not (self.repository and self.mirror), "mirror has no effect with repository")
        require(self.retries >= 0, "retries must be at least 0")
        require(self.timeout_s > 0, "timeout_s must be positive")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Section `validate`: what the tables must look like."""

    min_rows: int = 1
    min_date: str = "1990-01-01"  # ISO dates, UTC; a timestamp outside is critical
    max_date: str = "2035-01-01"
    max_duplicate_share: float = 0.05  # rows that repeat (user, item, time)
    max_volume_change: float = 0.1  # relative distance from the source's known number of rows
    max_drift: float = 0.25  # population stability index against the baseline; more is a warning
    engine: str = "polars"  # polars: the table fits into memory | spark: it need not

    def __post_init__(self) -> None:
        require(self.engine in ("polars", "spark"), "engine must be polars or spark")
        require(self.min_rows >= 1, "min_rows must be at least 1")
        require(
            date.fromisoformat(self.min_date) < date.fromisoformat(self.max_date), "min_date must be before max_date"
        )
        require(0.0 <= self.max_duplicate_share <= 1.0, "max_duplicate_share must be between 0 and 1")
        require(self.max_volume_change >= 0, "max_volume_change must not be negative")
        require(self.max_drift > 0, "max_drift must be positive")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Section `prepare`: filters, order and split."""

    deduplicate: str = "exact"  # exact: same user, item, time | first_pair: same user, item | none
    min_rating: float = 0.0  # keep events rated at least this; 0 keeps everything, unrated events too
    require_title: bool = False  # drop items without a title before the k-core
    min_user_events: int = 5  # iterated k-core
    min_item_events: int = 5
    sample_users: int = 0  # after the k-core keep this many random users; 0 keeps all
    protocol: str = "LOO-full"
    val_users: int = 0  # validate on this many random users, the others train on that event; 0 = all
    valid_share: float = 0.1  # RATIO-full: of each user's events | temporal: of all events, between the two cuts
    test_share: float = 0.1  # RATIO-full: of each user's events | temporal: of all events, after the second cut
    cases: str = "all"  # temporal: every event after the cut is a case | first: the user's first only
    noise_share: float = 0.0  # of the training events get a random item, to see what a model makes of noise
    seed: int = 42
    extend: str = ""  # folder of sequences made of an earlier dump: users and items keep their numbers, new ones follow
    engine: str = "polars"  # polars: one machine | spark: a cluster, the same result
    shard_events: int = 1 << 25  # of a part of sequences.arrow, and as many as are in memory at once

    def __post_init__(self) -> None:
        require(self.engine in ("polars", "spark"), "engine must be polars or spark")
        require(1 <= self.shard_events <= 1 << 26, "shard_events must be at least 1 and at most 2^26")
        require(self.deduplicate in ("exact", "first_pair", "none"), "deduplicate must be exact, first_pair or none")
        require(self.protocol in PROTOCOLS, f"protocol must be one of {', '.join(PROTOCOLS)}")
        require(self.cases in ("all", "first"), "cases must be all or first")
        require(min(self.min_user_events, self.min_item_events) >= 1, "min_user_events, min_item_events: at least 1")
        require(min(self.sample_users, self.val_users) >= 0, "sample_users and val_users must be at least 0")
        require(self.valid_share > 0 and self.test_share > 0, "valid_share and test_share must be positive")
        require(self.valid_share + self.test_share < 1, "valid_share + test_share must be under 1")
        require(0 <= self.noise_share < 1, "noise_share must be at least 0 and under 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of both training stages."""

    seed: int = 42
    epochs: int = 50
    batch_size: int = 128  # users of average length a step
    loss: str = "ce"  # ce | sampled_ce | bce | gbce | bpr
    negatives: int = 256  # drawn per step for sampled_ce, per target for bce, gbce and bpr
    sampler: str = "uniform"  # of negatives: uniform | popularity (by train events) | in_batch (targets of the step)
    exclude_past: bool = False  # ce: the items of a window are no candidates, as `filter_seen` has it at test
    sparse_tables: bool = False  # sampled losses: a step reads and updates the rows it uses alone, for huge catalogues
    gbce_t: float = 0.75  # gbce: 0 is bce, 1 is calibrated for the whole catalogue
    windows: str = "last"  # causal, cloze: each user's last window | all: a chain without overlap
    prefixes_per_user: int = 0  # last: random prefixes a user and epoch; 0 = all
    earliest_target: float = 0.0  # last: no target before this share of a history; 0.5 = the later half
    user_share: float = 1.0  # of the users train, a seeded draw: what little data gives
    mask_probability: float = 0.2  # cloze
    mask_last_share: float = 0.1  # cloze: share of the windows where the last event alone is masked, as at test
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5  # where the cosine ends
    warmup_steps: int = 100
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # 0 = off
    patience: int = 10  # evaluations without a better valid/ndcg@10 before stopping
    eval_every: int = 1  # epochs
    precision: str = "fp32"  # fp32 | bf16
    deterministic: bool = False  # only deterministic kernels, whatever they cost
    save_steps: int = 500  # a resume state every so many steps, besides the end of each epoch
    resident: bool = True  # false: events stay in the mapped file, batches are gathered ahead; larger than any memory

    def __post_init__(self) -> None:
        require(self.epochs >= 0, "epochs must be at least 0")
        require(min(self.batch_size, self.patience, self.eval_every) >= 1, "batch_size, patience, eval_every: >= 1")
        require(self.learning_rate > 0, "learning_rate must be positive")
        require(0 <= self.min_learning_rate <= self.learning_rate, "min_learning_rate: between 0 and learning_rate")
        require(
            min(self.warmup_steps, self.weight_decay, self.clip_norm) >= 0,
            "warmup_steps, weight_decay, clip_norm: >= 0",
        )
        require(self.save_steps >= 1, "save_steps must be at least 1")
        require(self.loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}")
        require(self.sampler in ("uniform", "popularity", "in_batch"), "sampler: uniform, popularity or in_batch")
        require(not self.exclude_past or self.loss == "ce", "exclude_past: only loss ce has all items as candidates")
        require(not (self.sparse_tables and self.loss == "ce"), "sparse_tables: loss ce reads all rows; use sampled_ce")
        require(
            not (self.sparse_tables and self.weight_decay), "sparse_tables: weight_decay reads every row; set it to 0"
        )
        require(self.windows in ("last", "all"), "windows must be last or all")
        require(self.prefixes_per_user >= 0, "prefixes_per_user must be at least 0")
        require(0 <= self.earliest_target < 1, "earliest_target must be at least 0 and under 1")
        require(0 < self.user_share <= 1, "user_share must be more than 0 and at most 1")
        require(0 < self.mask_probability < 1, "mask_probability must be between 0 and 1")
        require(0 <= self.mask_last_share <= 1, "mask_last_share must be between 0 and 1")
        require(self.negatives >= 1, "negatives must be at least 1")
        require(0 <= self.gbce_t <= 1, "gbce_t must be between 0 and 1")
        require(self.precision in ("fp32", "bf16"), "precision must be fp32 or bf16")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Section `pretrain`; models without a pre-training phase use its seed alone."""

    held_out: float = 0.05  # text models: share of the users that select the weights and are not trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.held_out < 1, "held_out must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class CountsConfig:
    """The count term of a score; docs/counts.md has the formula."""

    alpha: float = 1.0  # 0: none
    kernel: str = "inverse"  # of the distance between two events: inverse, root, square, or a number to be its power
    window: int = 10  # events after one that count as following it
    smoothing: float = 0.3  # tau / |I|: what every pair is taken to have been counted before
    rho: float = 0.65  # weight of an event over that of the next one
    events: int = 10  # that vote, the newest ones
    popularity: float = 0.0  # lambda, of the log of an item's share of the training events
    targets: int = 0  # kept of an item, the largest counts; 0 chooses by the size of the catalogue

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "alpha must be at least 0")
        require(min(self.window, self.events) >= 1, "window and events must be at least 1")
        require(self.smoothing > 0, "smoothing must be positive")
        require(0 < self.rho <= 1, "rho must be more than 0 and at most 1")
        require(self.targets >= 0, "targets must be at least 0")
        if self.kernel not in ("inverse", "root", "square"):
            require(self.kernel.replace(".", "", 1).isdigit(), "kernel: inverse, root, square, or a number such as 0.7")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """Section `finetune`."""

    counts: str | dict[str, Any] = "none"  # added to the scores: none | auto, chosen on validation | of CountsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.counts, str):
            require(self.counts in ("none", "auto"), "counts must be none, auto, or a mapping of values")
        else:
            parse(CountsConfig, self.counts, "counts")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Section `evaluate`."""

    filter_seen: bool = True  # remove the user's past items from the candidates; the target always stays
    top_k: int = 20  # recommendations kept for every user
    bootstrap: int = 1000  # resamples of users behind the intervals
    seed: int = 42

    def __post_init__(self) -> None:
        require(self.top_k >= 10, "top_k must be at least 10: the list metrics at 10 are computed from it")
        require(self.bootstrap >= 100, "bootstrap must be at least 100")


@dataclass(frozen=True, kw_only=True)
class RegisterConfig:
    """Section `register`: where runs go and what a champion must show."""

    tracking_uri: str = "sqlite:///mlflow.db"  # MLFLOW_TRACKING_URI wins
    experiment: str = EXPERIMENT
    min_gain: float = 0.0  # absolute gain of valid/ndcg@10 over the champion
    confidence: float = 0.95  # the paired interval of the gain must lie above min_gain at this level
    max_loss: float = 0.1  # share of the champion's coverage, and of its NDCG on tail items, that may be lost
    examples: int = 4  # users whose recommendations the report shows
    seed: int = 42

    def __post_init__(self) -> None:
        require(0 < self.confidence < 1, "confidence must be between 0 and 1")
        require(self.max_loss >= 0, "max_loss must be at least 0")
        require(self.examples >= 0, "examples must be at least 0")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Section `tune`: the budget of a search, and what is searched for each model."""

    trials: int = 20
    epochs: int = 0  # of a trial; 0 = finetune.epochs
    startup_trials: int = 5  # so many are drawn at random, and so many must be complete before one is pruned
    warmup_epochs: int = 5  # no trial is pruned in them
    seed: int = 42
    # model -> setting (finetune.learning_rate, options.dropout, ...) -> its Range
    spaces: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(min(self.trials, self.startup_trials) >= 1, "trials and startup_trials must be at least 1")
        require(min(self.epochs, self.warmup_epochs) >= 0, "epochs and warmup_epochs must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of one searched setting: `choices`, or all from `low` to `high`, whole numbers if both are."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False  # drawn evenly on the logarithm
    step: int | float | None = None
    choices: list[bool | int | float | str] | None = None

    def __post_init__(self) -> None:
        if self.choices is not None:
            require(len(self.choices) > 0, "choices must not be empty")
            require((self.low, self.high, self.log, self.step) == (None, None, False, None), "choices stand alone")
            return
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        require(self.low < self.high, "low must be below high")
        require(not self.log or self.low > 0, "log needs a positive low")
        require(self.step is None or (self.step > 0 and not self.log), "step must be positive, and log excludes it")


@dataclass(frozen=True, kw_only=True)
class StepResources:
    """What the pod of a Kubeflow step asks for; what is empty or 0 is not asked for."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    cpu: str = "1"  # cores requested; there is no limit, which would only slow a step down
    memory: str = "4Gi"  # requested, and the limit
    gpus: int = 0
    gpu_type: str = "nvidia.com/gpu"
    shared_memory: str = ""  # size of /dev/shm, which torch's processes share
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, str]] = field(default_factory=list)  # key, operator, value, effect
    retries: int = 2
    backoff_s: int = 30  # before the first retry, doubled before each other one
    timeout_s: int = 0  # of one attempt

    def __post_init__(self) -> None:
        require(min(self.gpus, self.retries, self.backoff_s, self.timeout_s) >= 0, "numbers must be at least 0")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a step runs what may be too much for one process."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    launcher: str = "step"  # step: in its own pod | job: a TrainJob (training) or SparkApplication (prepare) it awaits
    nodes: int = 1  # pods of the job; executors of Spark
    processes: int = 1  # of training, on each node
    runtime: str = "torch-distributed"  # the ClusterTrainingRuntime of a TrainJob
    image: str = ""  # of the job, where it cannot be that of the steps: Spark's needs its own entry point
    poll_s: float = 15.0

    def __post_init__(self) -> None:
        require(self.launcher in ("step", "job"), "launcher must be step or job")
        require(min(self.nodes, self.processes) >= 1, "nodes and processes must be at least 1")
        require(self.nodes == 1 or self.launcher == "job", "nodes: more than one needs launcher: job")
        require(self.poll_s > 0, "poll_s must be positive")


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Section `kubernetes`: what the steps ask of a cluster, and what they find there."""

    resources: dict[str, dict[str, Any]] = field(  # step, or default, to StepResources
        default_factory=lambda: {"validate": {"retries": 0}}  # what is wrong with the data stays wrong
    )
    launch: dict[str, LaunchConfig] = field(default_factory=dict)  # pretrain, finetune, prepare
    state_claim: str = ""  # PersistentVolumeClaim for downloads and resume states; "": lost with the pod
    data_claim: str = ""  # one that holds the files of ingest, mounted at /data
    environment: dict[str, str] = field(default_factory=dict)  # of every step
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)  # Secret to its key: variable of every step
    image_pull_secrets: list[str] = field(default_factory=list)
    service_account: str = ""  # of the run; "": the cluster's default
    user: int = 10001  # numeric, and never 0
    labels: dict[str, str] = field(default_factory=dict)  # of every pod

    def __post_init__(self) -> None:
        require(self.user > 0, "user must not be root")
        require(set(self.launch) <= {"pretrain", "finetune", "prepare"}, "launch: pretrain, finetune or prepare")
        jobs = [stage for stage, launch in self.launch.items() if _launcher(launch) == "job"]
        require(not jobs or bool(self.state_claim), f"state_claim: where jobs of {', '.join(jobs)} find their data")
        for step in self.resources:
            self.step(step)

    def step(self, name: str) -> StepResources:
        """Return what step `name` asks for: its own entry over `default`."""
        values = {**self.resources.get("default", {}), **self.resources.get(name, {})}
        return parse(StepResources, values, f"kubernetes.resources.{name}")


def _launcher(launch: Any) -> str:
    """Return the launcher of a LaunchConfig, or of the mapping it still is where nothing casts."""
    return str(launch.launcher if isinstance(launch, LaunchConfig) else launch.get("launcher", "step"))


SECTIONS: dict[str, type] = {
    "ingest": IngestConfig,
    "validate": ValidateConfig,
    "prepare": PrepareConfig,
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "evaluate": EvaluateConfig,
    "register": RegisterConfig,
    "tune": TuneConfig,
    "kubernetes": KubernetesConfig,
}
DATASET_KEYS = ("ingest", "validate", "prepare", "pretrain", "finetune", "evaluate", "options")
MODEL_KEYS = ("architecture", "options", "pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `pretrain` builds a model from: an entry of `models`, merged with the dataset's options."""

    architecture: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Params:
    """`params.yaml` with its keys checked; sections are parsed when a stage asks for one."""

    dataset: str
    sources: tuple[str, ...]
    leaderboard: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]
    datasets: Mapping[str, Mapping[str, Mapping[str, Any]]]
    models: Mapping[str, Mapping[str, Any]]

    def section(self, stage: str, *, model: str | None = None, dataset: str | None = None) -> Any:
        """Return the parsed section of `stage`, shared < dataset's < model's."""
        dataset = dataset or self.dataset
        values, path = dict(self.sections[stage]), stage
        if own := self.dataset_entry(dataset).get(stage):
            values, path = values | dict(own), f"datasets.{dataset}.{stage}"
        if model is not None and (own := self.model_entry(model).get(stage)):
            values, path = values | dict(own), f"models.{model}.{stage}"
        return parse(SECTIONS[stage], values, path)

    def model(self, name: str) -> ModelConfig:
        """Return architecture and options of `models.<name>`; the dataset's options are its defaults."""
        entry = self.model_entry(name)
        options = {**self.dataset_entry(self.dataset).get("options", {}), **entry.get("options", {})}
        return ModelConfig(architecture=entry["architecture"], options=options)

    def space(self, model: str) -> dict[str, Range]:
        """Return what `tune.spaces.<model>` searches: setting -> range.

        Raises:
            ConfigError: nothing is declared for the model, or a setting or range is wrong.
        """
        spaces, path = self.section("tune").spaces, f"tune.spaces.{model}"
        if not spaces.get(model):
            raise ConfigError(f"{path}: nothing to search; declare ranges such as finetune.learning_rate there")
        fields = {s: [f.name for f in dataclasses.fields(SECTIONS[s])] for s in ("pretrain", "finetune")}
        for key in spaces[model]:
            section, _, name = key.partition(".")
            if not name or name not in fields.get(section, [name] if section == "options" else []):
                raise ConfigError(f"{path}.{key}: no such setting; expected pretrain.*, finetune.* or options.*")
        if self.section("tune").epochs and "finetune.epochs" in spaces[model]:
            raise ConfigError(f"{path}.finetune.epochs: tune.epochs sets it as well; drop one of them")
        return {key: parse(Range, values, f"{path}.{key}") for key, values in spaces[model].items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the content, shaped as params.yaml."""
        tops = {"dataset": self.dataset, "sources": list(self.sources), "leaderboard": list(self.leaderboard)}
        return tops | dict(self.sections) | {"datasets": self.datasets, "models": self.models}

    def dataset_entry(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Return `datasets.<name>`."""
        if name not in self.datasets:
            raise ConfigError(f"dataset: no entry datasets.{name}; there are {', '.join(self.datasets)}")
        return self.datasets[name]

    def model_entry(self, name: str) -> Mapping[str, Any]:
        """Return `models.<name>`."""
        if name not in self.models:
            raise ConfigError(f"leaderboard: no entry models.{name}; there are {', '.join(self.models)}")
        return self.models[name]


def load(path: Path) -> Params:
    """Read `params.yaml`; every key of every section is checked, also of those that this run does not use.

    Raises:
        ConfigError: with the path of the first wrong key.
    """
    if not path.is_file():
        raise ConfigError(f"{path} not found: run from the project's folder or give --params")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    return from_dict(content)


def from_dict(content: Mapping[str, Any]) -> Params:
    """Check the keys of `content`, shaped as params.yaml, and wrap it."""
    if isinstance(content, Mapping):  # a pipeline does not search: its settings may leave the section out
        content = {"tune": {}, "kubernetes": {}, **content}
    top = ("dataset", "sources", "leaderboard", *SECTIONS, "datasets", "models")
    _check_keys(content, top, "params.yaml", required=True)
    for name in ("sources", "leaderboard"):
        if not isinstance(content[name], (list, tuple)):
            raise ConfigError(f"{name}: expected a list of names, got {content[name]!r:.80}")
    _check_sections(content, "")
    for group, keys in (("datasets", DATASET_KEYS), ("models", MODEL_KEYS)):
        _check_keys(content[group], content[group], group)
        for name, entry in content[group].items():
            _check_keys(entry, keys, f"{group}.{name}", required=True)
            _check_keys(entry["options"], entry["options"], f"{group}.{name}.options")
            _check_sections(entry, f"{group}.{name}.")
    params = Params(
        dataset=content["dataset"],
        sources=tuple(content["sources"]),
        leaderboard=tuple(content["leaderboard"]),
        sections={stage: content[stage] for stage in SECTIONS},
        datasets=content["datasets"],
        models=content["models"],
    )
    for stage, cls in SECTIONS.items():  # layer by layer, so that a message names the one at fault
        parse(cls, {**({"source": ""} if stage == "ingest" else {}), **content[stage]}, stage)
    for dataset in params.datasets:
        for stage in SECTIONS:
            params.section(stage, dataset=dataset)
    for model in params.models:
        for stage in ("pretrain", "finetune"):
            params.section(stage, model=model)
    for name in (params.dataset, *params.sources):
        params.dataset_entry(name)
    for name in params.leaderboard:
        params.model_entry(name)
    for name in params.section("tune").spaces:
        if name not in params.models:
            raise ConfigError(f"tune.spaces.{name}: no entry models.{name}; there are {', '.join(params.models)}")
        params.space(name)
    return params


def parse(cls: type[Section], values: Mapping[str, Any], path: str) -> Section:
    """Build the dataclass `cls` from `values`; `path` is the key that error messages start with.

    Raises:
        ConfigError: unknown key, missing key, wrong type or value out of range.
    """
    _check_keys(values, [f.name for f in dataclasses.fields(cls)], path)  # type: ignore[arg-type]
    try:
        if not CASTS:
            return cls(**values)
        parsed: Section = _adapter(cast(type, cls)).validate_python(dict(values))
        return parsed
    except ValueError as error:  # pydantic's ValidationError is one
        raise ConfigError(_explain(error, path)) from error
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error


@functools.cache
def _adapter(cls: type) -> Any:
    return pydantic.TypeAdapter(cls)


def _explain(error: ValueError, path: str) -> str:
    if not CASTS or not isinstance(error, pydantic.ValidationError):
        return f"{path}: {error}"
    lines = []
    for detail in error.errors():
        key = ".".join([path, *(str(part) for part in detail["loc"])])
        lines.append(f"{key}: {detail['msg'].removeprefix('Value error, ')} (got {detail['input']!r:.80})")
    return "; ".join(lines)


def _check_sections(layer: Mapping[str, Any], prefix: str) -> None:
    for stage, cls in SECTIONS.items():
        if stage in layer:
            _check_keys(layer[stage], [f.name for f in dataclasses.fields(cls)], f"{prefix}{stage}")


def _check_keys(values: Any, known: Any, path: str, *, required: bool = False) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping of settings, got {values!r:.80}")
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}.{key}: unknown key; known are {', '.join(known)}")
    for key in known if required else ():
        if key not in values:
            raise ConfigError(f"{path}.{key}: missing key")
