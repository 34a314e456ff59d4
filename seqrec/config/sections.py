"""The sections of `params.yaml`: one frozen dataclass each, with type, range, default and meaning of every key.

They are plain dataclasses, so that the training core needs no more than torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from seqrec.config.checks import Section, parse, require
from seqrec.config.ranges import (
    AUTO,
    Bounds,
    Count,
    Fraction,
    NotNegative,
    OrAuto,
    Positive,
    PositiveReal,
    Seed,
    Share,
)

EXPERIMENT = "seqrec"  # MLflow's
REFITS = ("none", "valid")  # what the test cases are ranked by has seen the validation events, or not
LAUNCHED = ("prepare", "pretrain", "finetune")  # steps that can be a job
STEPS = (  # of the Kubeflow pipelines; `default` stands for all of them
    *("default", "ingest", "validate", "prepare", "baselines", *LAUNCHED[1:], "evaluate", "register"),
    *("champion", "join", "record", "settings"),
)


@dataclass(frozen=True, kw_only=True)
class IngestConfig(Section):
    """Section `ingest`: which source is read, and how forgivingly."""

    source: str  # a name in seqrec.data.sources.SOURCES; a dataset's default is its own name
    category: str = ""  # Amazon: the category as the file names spell it, e.g. Gift_Cards
    interactions: str = ""  # csv, lines: path or URL of the events; prefixes: the path up to `.train.inter`
    items: str = ""  # csv, prefixes, lines: path or URL of the items file; empty for none
    columns: dict[str, str] = field(default_factory=dict)  # csv: our name -> the file's; items.NAME: of items alone
    time_format: str = ""  # csv: format of the times, e.g. "%d/%m/%Y %H:%M"; empty: ISO 8601, or a number since 1970
    lines: Literal["", "sequences", "pairs"] = ""  # `user item item ...` | `user item`; empty: the file decides
    sha256: dict[str, str] = field(default_factory=dict)  # file's role (interactions, items) -> its digest, if pinned
    mirror: str = ""  # directory or URL tried before the official one; SEQREC_DATA_MIRROR wins
    repository: str = ""  # a DVC project; its ingested tables are fetched as they are
    revision: str = ""  # commit, tag or branch of that project
    max_bad_share: Share = 0.01  # a larger share of malformed rows fails the stage
    retries: Annotated[int, Bounds(ge=0, le=1000)] = 4  # attempts per URL after the first, with exponential backoff
    timeout_s: PositiveReal = 30.0  # of a connection, and of each wait for data

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.repository) == bool(self.revision), "repository and revision go together")
        require(not (self.repository and self.mirror), "mirror has no effect with repository")
        require(_is_time_format(self.time_format), f"time_format: {self.time_format!r} is no format of a date")


def _is_time_format(text: str) -> bool:
    """Return whether strptime reads back at least the day of what strftime writes in this format; empty is one."""
    day = datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)
    try:
        return not text or datetime.strptime(day.strftime(text), text).date() == day.date()
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(Section):
    """Section `validate`: what the tables must look like."""

    min_rows: Positive = 1  # fewer rows fail the stage
    min_date: str = "1990-01-01"  # ISO date, UTC; an earlier event fails the stage
    max_date: str = "2035-01-01"  # ISO date, UTC; a later event fails the stage
    max_duplicate_share: Share = 0.05  # rows that repeat (user, item, time)
    max_volume_change: NotNegative = 0.1  # relative distance from the source's known number of rows
    max_drift: PositiveReal = 0.25  # population stability index against the baseline; more is a warning
    engine: Literal["polars", "spark"] = "polars"  # polars: the table fits into memory | spark: it need not

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = (_day(name, getattr(self, name)) for name in ("min_date", "max_date"))
        require(first < last, "min_date must be before max_date")


def _day(name: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a date such as 1990-01-31, not {text!r:.80}") from error


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Section):
    """Section `prepare`: filters, order and split."""

    deduplicate: Literal["exact", "first_pair", "none"] = "exact"  # of user, item and time | of user and item
    min_rating: float = 0.0  # keep events rated at least this; 0 keeps everything, unrated events too
    require_title: bool = False  # drop items without a title before the k-core
    min_user_events: Positive = 5  # k-core: users with fewer events are dropped, again and again
    min_item_events: Positive = 5  # k-core: the same for items
    sample_users: Count = 0  # after the k-core keep this many random users; 0 keeps all
    protocol: Literal["LOO-full", "LOO-101", "RATIO-full", "temporal"] = (
        "LOO-full"  # split and candidates; docs/data.md
    )
    val_users: Count = 0  # validate on this many random users, the others train on that event; 0 = all
    valid_share: Fraction = 0.1  # RATIO-full: of each user's events | temporal: of all, between the two cuts
    test_share: Fraction = 0.1  # RATIO-full: of each user's events | temporal: of all events, after the second cut
    cases: Literal["all", "first"] = "all"  # temporal: every event after the cut is a case | the user's first
    filter_on: Literal["train", "all"] = "train"  # temporal: the k-core counts events before the first cut | all events
    noise_share: Annotated[float, Bounds(ge=0, lt=1)] = 0.0  # of the training events get a random item
    seed: Seed = 42  # of every random draw of this stage
    extend: str = ""  # folder of sequences made of an earlier dump: users and items keep their numbers, new ones follow
    engine: Literal["polars", "spark"] = "polars"  # polars: one machine | spark: a cluster, the same result
    shard_events: Annotated[int, Bounds(ge=1, le=1 << 26)] = 1 << 25  # of a part of sequences.arrow, in memory at once

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.valid_share + self.test_share < 1, "valid_share + test_share must be under 1")


@dataclass(frozen=True, kw_only=True)
class ContrastConfig(Section):
    """A contrastive term beside the loss: two views of a window are drawn together, those of other rows apart."""

    weight: NotNegative = 0.1  # of views of one window, which dropout tells apart; 0: without
    same_target: NotNegative = 0.0  # weight of views of two windows that lead to the same item; 0: without
    temperature: PositiveReal = 1.0  # of the softmax over the batch
    similarity: Literal["dot", "cosine"] = "dot"  # of two views

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.weight + self.same_target > 0, "weight and same_target are both 0: leave contrast out")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of both training stages."""

    seed: Seed = 42  # of initialisation (pretrain), order, dropout and negatives; left out: the top-level `seed`
    epochs: Annotated[Count, OrAuto()] = 50  # at most; see patience; auto, here and below: docs/auto.md
    batch_size: Annotated[Positive, OrAuto()] = 128  # users of average length a step
    loss: Literal["ce", "sampled_ce", "bce", "gbce", "bpr"] = "ce"  # see docs/architecture.md
    negatives: Annotated[int, Bounds(ge=1, le=1 << 24)] = 256  # sampled_ce: per step | bce, gbce, bpr: per target
    sampler: Literal["uniform", "popularity", "in_batch"] = "uniform"  # of negatives; in_batch: the step's targets
    contrast: dict[str, Any] = field(default_factory=dict)  # of ContrastConfig: a term beside the loss; empty: none
    exclude_past: bool = False  # ce: the items of a window are no candidates, as `filter_seen` has it at test
    sparse_tables: bool = False  # sampled losses: a step reads and updates the rows it uses alone, for huge catalogues
    gbce_t: Share = 0.75  # gbce: 0 is bce, 1 is calibrated for the whole catalogue
    windows: Annotated[Literal["last", "all"], OrAuto()] = "last"  # causal, cloze: a user's last | all, without overlap
    prefixes_per_user: Count = 0  # last: random prefixes a user and epoch; 0 = all
    earliest_target: Annotated[float, Bounds(ge=0, lt=1)] = 0.0  # last: no target before this share of a history
    user_share: Annotated[float, Bounds(gt=0, le=1)] = 1.0  # of the users train, a seeded draw: what little data gives
    mask_probability: Fraction = 0.2  # cloze
    mask_last_share: Share = 0.1  # cloze: share of the windows where the last event alone is masked, as at test
    learning_rate: PositiveReal = 1e-3  # the highest, after the warm-up; a cosine lowers it
    min_learning_rate: NotNegative = 1e-5  # where the cosine ends
    warmup_steps: Annotated[Count, OrAuto()] = 100  # in which the rate rises from 0
    weight_decay: NotNegative = 0.0  # of matrices, as in AdamW
    clip_norm: NotNegative = 1.0  # 0 = off
    patience: Annotated[Positive, OrAuto()] = 10  # evaluations without a better valid/ndcg@10 before stopping
    eval_every: Positive = 1  # epochs
    precision: Annotated[Literal["fp32", "bf16"], OrAuto()] = "fp32"  # of the forward pass; weights stay fp32
    deterministic: bool = False  # only deterministic kernels, whatever they cost
    save_steps: Positive = 500  # a resume state every so many steps, besides the end of each epoch
    resident: bool = True  # false: events stay in the mapped file, batches are gathered ahead; larger than any memory

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_learning_rate <= self.learning_rate, "min_learning_rate must be at most learning_rate")
        parse(ContrastConfig, self.contrast, "contrast")
        require(not self.exclude_past or self.loss == "ce", "exclude_past: only loss ce has all items as candidates")
        require(not (self.sparse_tables and self.loss == "ce"), "sparse_tables: loss ce reads all rows; use sampled_ce")
        require(
            not (self.sparse_tables and self.weight_decay), "sparse_tables: weight_decay reads every row; set it to 0"
        )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Section `pretrain`; models without a pre-training phase use its seed alone."""

    held_out: Fraction = 0.05  # text models: users that select the weights and are not trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            require(value != AUTO, f"{name} cannot be auto: the rules are those of finetune")


@dataclass(frozen=True, kw_only=True)
class CountsConfig(Section):
    """The count term of a score; docs/counts.md has the formula."""

    alpha: NotNegative = 1.0  # 0: none
    kernel: str = "inverse"  # of the distance between two events: inverse, root, square, or a number to be its power
    window: Annotated[int, Bounds(ge=1, le=1000)] = 10  # events after one that count as following it
    smoothing: PositiveReal = 0.3  # tau / |I|: what every pair is taken to have been counted before
    rho: Annotated[float, Bounds(gt=0, le=1)] = 0.65  # weight of an event over that of the next one
    events: Annotated[int, Bounds(ge=1, le=1000)] = 10  # that vote, the newest ones
    popularity: float = 0.0  # lambda, of the log of an item's share of the training events
    targets: Count = 0  # kept of an item, the largest counts; 0 chooses by the size of the catalogue

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.kernel in ("inverse", "root", "square")
        require(
            named or self.kernel.replace(".", "", 1).isdigit(), "kernel: inverse, root, square, or a number like 0.7"
        )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """Section `finetune`."""

    counts: str | dict[str, Any] = "none"  # added to the scores: none | auto, chosen on validation | of CountsConfig
    refit: str = "none"  # that of `evaluate`, which alone sets it

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.refit in REFITS, f"refit must be one of {', '.join(REFITS)}")
        if isinstance(self.counts, str):
            require(self.counts in ("none", "auto"), "counts must be none, auto, or a mapping of values")
        else:
            parse(CountsConfig, self.counts, "counts")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Section `evaluate`."""

    filter_seen: bool = True  # remove the user's past items from the candidates; the target always stays
    refit: str = "none"  # valid: what ranks the test cases was trained on the validation events too, for as many epochs
    top_k: Annotated[int, Bounds(ge=10, le=100_000)] = 20  # recommendations kept for every user; metrics need ten
    bootstrap: Annotated[int, Bounds(ge=100, le=100_000)] = 1000  # resamples of users behind the intervals
    seed: Seed = 42  # of the resampling

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.refit in REFITS, f"refit must be one of {', '.join(REFITS)}")


@dataclass(frozen=True, kw_only=True)
class RegisterConfig(Section):
    """Section `register`: where runs go and what a champion must show."""

    tracking_uri: str = "sqlite:///mlflow.db"  # MLFLOW_TRACKING_URI wins
    experiment: str = EXPERIMENT  # of MLflow
    min_gain: float = 0.0  # absolute gain of valid/ndcg@10 over the champion
    confidence: Fraction = 0.95  # at this level the paired interval of the gain must lie above min_gain
    max_loss: NotNegative = 0.1  # share of the champion's coverage, and of its NDCG on tail items, that may be lost
    allow_below_baseline: bool = False  # a model below the best baseline on validation may become champion
    examples: Annotated[int, Bounds(ge=0, le=1000)] = 4  # users whose recommendations the report shows
    seed: Seed = 42  # of their choice, and of the gate's resampling


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Section):
    """Section `tune`: the budget of a search, and what is searched for each model."""

    trials: Positive = 20  # per model
    epochs: Count = 0  # of a trial; 0 = finetune.epochs
    startup_trials: Positive = 5  # so many are drawn at random, and so many must be complete before one is pruned
    warmup_epochs: Count = 5  # no trial is pruned in them
    seed: Seed = 42  # of the search
    # model -> setting (finetune.learning_rate, options.dropout, ...) -> its Range
    spaces: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of one searched setting: `choices`, or all from `low` to `high`, whole numbers if both are."""

    low: int | float | None = None  # smallest value
    high: int | float | None = None  # largest value
    log: bool = False  # drawn evenly on the logarithm
    step: int | float | None = None  # distance of the values, counted from `low`
    choices: list[bool | int | float | str] | None = None  # the only values, instead of a range

    def __post_init__(self) -> None:
        if self.choices is not None:
            require(len(self.choices) > 0, "choices must not be empty")
            require((self.low, self.high, self.log, self.step) == (None, None, False, None), "choices stand alone")
            return
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        require(math.isfinite(self.low) and math.isfinite(self.high), "low and high must be finite numbers")
        require(self.low < self.high, "low must be below high")
        require(not self.log or self.low > 0, "log needs a positive low")
        require(self.step is None or (self.step > 0 and not self.log), "step must be positive, and log excludes it")


@dataclass(frozen=True, kw_only=True)
class StepResources(Section):
    """What the pod of a Kubeflow step asks for; what is empty or 0 is not asked for."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    cpu: str = "1"  # cores requested; there is no limit, which would only slow a step down
    memory: str = "4Gi"  # requested, and the limit
    gpus: Count = 0  # per pod
    gpu_type: str = "nvidia.com/gpu"  # resource name of a GPU
    shared_memory: str = ""  # size of /dev/shm, which torch's processes share
    node_selector: dict[str, str] = field(default_factory=dict)  # labels that the node must have
    tolerations: list[dict[str, str]] = field(default_factory=list)  # key, operator, value, effect
    retries: Annotated[int, Bounds(ge=0, le=1000)] = 2  # attempts after the first
    backoff_s: Count = 30  # before the first retry, doubled before each other one
    timeout_s: Count = 0  # of one attempt


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """How a step runs what may be too much for one process."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    launcher: Literal["step", "job"] = "step"  # its own pod | a TrainJob or SparkApplication that it awaits
    nodes: Positive = 1  # pods of the job; executors of Spark
    processes: Positive = 1  # of training, on each node
    runtime: str = "torch-distributed"  # the ClusterTrainingRuntime of a TrainJob
    image: str = ""  # of the job, where it cannot be that of the steps: Spark's needs its own entry point
    poll_s: PositiveReal = 15.0  # seconds between looks at the job

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.nodes == 1 or self.launcher == "job", "nodes: more than one needs launcher: job")


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig(Section):
    """Section `kubernetes`: what the steps ask of a cluster, and what they find there."""

    resources: dict[str, dict[str, Any]] = field(  # step, or default, to StepResources
        default_factory=lambda: {"validate": {"retries": 0}}  # what is wrong with the data stays wrong
    )
    launch: dict[str, LaunchConfig] = field(default_factory=dict)  # pretrain, finetune, prepare
    state_claim: str = ""  # PersistentVolumeClaim for downloads and resume states; "": lost with the pod
    data_claim: str = ""  # one that holds the files of ingest, mounted at /data
    environment: dict[str, str] = field(default_factory=dict)  # of every step
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)  # Secret to its key: variable of every step
    image_pull_secrets: list[str] = field(default_factory=list)  # Secrets for a private registry
    service_account: str = ""  # of the run; "": the cluster's default
    user: Positive = 10001  # numeric, and never 0
    labels: dict[str, str] = field(default_factory=dict)  # of every pod

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("launch", LAUNCHED), ("resources", STEPS)):
            for step in set(getattr(self, name)) - set(known):
                raise ValueError(f"{name}.{step}: unknown step; known are {', '.join(known)}")
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
AUTO_WIDTHS = ("d_model", "d_state", "d_shared", "d_value", "d_expert")
AUTO_OPTIONS = frozenset(("length", "layers", "dropout", "user_gate", "user_dropout", *AUTO_WIDTHS))  # auto_settings.py
MODEL_KEYS = ("architecture", "options", "pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """What `pretrain` builds a model from: an entry of `models`, merged with the dataset's options."""

    architecture: str
    options: dict[str, Any]

    @property
    def settled(self) -> dict[str, Any]:
        """The options but those that are `auto`, which the shape of the data decides."""
        return {name: value for name, value in self.options.items() if name not in AUTO_OPTIONS or value != AUTO}
