"""The sections of `params.yaml`: a frozen dataclass each, with type, range, default and meaning of every key.

They are plain dataclasses so that the training core depends only on torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Annotated, Any, ClassVar, Literal

from seqrec.config.checks import STORES, Section, check_address, parse, require
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
from seqrec.config.serving import ServeConfig
from seqrec.pipeline import BY_NAME

EXPERIMENT = "seqrec"  # default name of the MLflow experiment
EASE_ITEMS = 20_000  # the item x item matrices of EASE then take 10 GB
LAUNCHED = ("prepare", "pretrain", "finetune")  # steps that can run as a job of the cluster
CPU = re.compile(r"\d+m?|\d*\.\d+")  # the quantities that Kubeflow Pipelines accepts
BYTES = re.compile(r"\d+(?:[EPTGM]i?|Ki)?")  # of K, Pipelines takes one that Kubernetes does not
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # of a Secret or a service account
CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # Kubeflow Pipelines names the volume after its claim
VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # its value, and its key behind any prefix
TOLERATED = {"operator": ("Equal", "Exists"), "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute")}
STEPS = (  # steps of the Kubeflow pipelines; `default` holds for all of them
    *("default", "champion", "collect", "join", "record", "settings"),
    *sorted(BY_NAME),
)
CERTAIN = ("settings", "ingest", "validate", "prepare")  # steps whose failures are wrong settings or data


@dataclass(frozen=True, kw_only=True)
class IngestConfig(Section):
    """Section `ingest`: the source to read, and how strictly."""

    source: str  # a dataset of docs/data.md, csv, lines or prefixes; default: the name of the dataset
    category: str = ""  # Amazon: the category, spelt as in the file names, e.g. Gift_Cards
    interactions: str = ""  # csv, lines: path or address of the events; prefixes: path without `.train.inter`
    items: str = ""  # csv, prefixes, lines: path or address (https://, s3://, gs://, az://) of the items; empty: none
    columns: dict[str, str] = field(default_factory=dict)  # csv: our column -> the file's; items.NAME: for items only
    time_format: str = ""  # csv: format of times, e.g. "%d/%m/%Y %H:%M"; empty: ISO 8601 or a Unix time
    lines: Literal["", "sequences", "pairs"] = ""  # `user item item ...` | `user item` per line; empty: detect
    sha256: dict[str, str] = field(default_factory=dict)  # role of a file (interactions, items) -> its expected digest
    mirror: str = ""  # folder or URL tried before the official one; SEQREC_DATA_MIRROR overrides it
    events: bool = False  # add the events of the event store (SEQREC_STORE) to the source; not under DVC
    repository: str = ""  # DVC project whose ingested tables are fetched instead of a source
    revision: str = ""  # commit, tag or branch of that project
    max_bad_share: Share = 0.01  # the stage fails if a larger share of the rows is malformed
    retries: Annotated[int, Bounds(ge=0, le=1000)] = 4  # attempts per URL after the first, with exponential backoff
    timeout_s: PositiveReal = 30.0  # seconds to wait for a connection, and for each block of data

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.repository) == bool(self.revision), "repository needs revision, and revision needs repository"
        )
        require(not (self.repository and self.mirror), "mirror has no effect with repository; leave one of them out")
        wrong = [role for role, digest in self.sha256.items() if not re.fullmatch("[0-9a-fA-F]{64}", digest)]
        require(not wrong, f"sha256.{''.join(wrong[:1])}: a SHA-256 has 64 hexadecimal digits")
        undated = self.source in ("lines", "prefixes")
        require(not (self.events and (self.repository or undated)), "events needs a source of files with dates")
        for name in ("interactions", "items", "mirror"):
            check_address(name, getattr(self, name), ("https", "http", *STORES))
        require(_is_time_format(self.time_format), f"time_format: {self.time_format!r} is not a date format")
        require("%Z" not in self.time_format, "time_format: names of time zones (%Z) are ambiguous; use offsets (%z)")
        has = {directive for directive in ("%H", "%I", "%M", "%p") if directive in self.time_format}
        require(("%I" in has) == ("%p" in has), "time_format: %I (of 12 hours) needs %p, and %p needs %I")
        require(
            "%M" not in has or not has.isdisjoint({"%H", "%I"}),
            "time_format: %M (minutes) needs %H (hours), or %I and %p",
        )


def _is_time_format(text: str) -> bool:
    """Return whether strptime can read the day of a date that strftime wrote in this format; empty is valid."""
    day = datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)
    try:
        return not text or datetime.strptime(day.strftime(text), text).date() == day.date()
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(Section):
    """Section `validate`: the requirements that the ingested tables must meet."""

    min_rows: Positive = 1  # minimum number of rows
    min_date: str = "1990-01-01"  # earliest date of an event, ISO, UTC
    max_date: str = "2035-01-01"  # latest date of an event, ISO, UTC
    max_duplicate_share: Share = 0.05  # maximum share of rows that repeat user, item and time
    max_volume_change: NotNegative = 0.1  # maximum relative difference from the known number of rows of the source
    max_drift: PositiveReal = 0.25  # a higher population stability index against the reference statistics is a warning
    engine: Literal["polars", "spark"] = "polars"  # polars: the table must fit into memory | spark: it need not

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

    deduplicate: Literal["exact", "first_pair", "none"] = "exact"  # drop repeats of user, item and time | user and item
    min_rating: float = 0.0  # minimum rating; 0 keeps all events, also those without a rating
    require_title: bool = False  # drop items without a title before the k-core
    min_user_events: Positive = 5  # k-core: users with fewer events are dropped
    min_item_events: Positive = 5  # k-core: items with fewer events are dropped
    sample_users: Count = 0  # number of random users to keep after the k-core; 0: all
    protocol: Literal["LOO-full", "LOO-101", "RATIO-full", "temporal"] = (
        "LOO-full"  # split and candidates; docs/data.md
    )
    val_users: Count = 0  # LOO: random users to validate on; the others train on their validation event; 0: all
    valid_share: Fraction = 0.1  # share for validation: of each user's events (RATIO-full) or of all events (temporal)
    test_share: Fraction = 0.1  # share for test: of each user's events (RATIO-full) or of all events (temporal)
    cases: Literal["all", "first"] = "all"  # temporal: cases are all events after the cut | each user's first
    max_cases: Count = 0  # random cases to rank, of validation and of test each, for large logs; 0: all
    filter_on: Literal["train", "all"] = "train"  # temporal: the k-core counts events before the first cut | all
    noise_share: Annotated[float, Bounds(ge=0, lt=1)] = 0.0  # share of training events that get a random item
    seed: Seed = 42  # seed of this stage
    newest_first: bool = False  # a user's events of one time are listed from the last to the first
    extend: str = ""  # folder of earlier sequences, whose users and items keep their numbers
    engine: Literal["polars", "spark"] = "polars"  # polars: one machine | spark: a cluster; same result
    shard_events: Annotated[int, Bounds(ge=1, le=1 << 26)] = 1 << 25  # events per part of sequences.arrow

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.valid_share + self.test_share < 1, "valid_share + test_share must be under 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of both training stages."""

    seed: Seed = 42  # seed of initialisation (pretrain), order, dropout and negatives; default: top-level `seed`
    epochs: Annotated[Count, OrAuto()] = 50  # maximum, see patience; docs/auto.md has the rules of auto
    batch_size: Annotated[Positive, OrAuto()] = 128  # windows of average length per step
    loss: Annotated[Literal["ce", "sampled_ce", "bce", "gbce", "bpr"], OrAuto()] = "ce"  # see docs/results/reading.md
    negatives: Annotated[int, Bounds(ge=1, le=1 << 24), OrAuto()] = 256  # sampled_ce: per step | else: per target
    sampler: Literal["uniform", "popularity", "in_batch"] = "uniform"  # of negatives; in_batch: the step's targets
    contrast: NotNegative = 0.0  # weight of a contrastive term between two dropout views of a window; 0: none
    exclude_past: bool = False  # ce: past items of the window are not candidates, as with `filter_seen` at test
    sparse_tables: Annotated[bool, OrAuto()] = False  # sampled losses: a step updates only the table rows that it reads
    gbce_t: Share = 0.75  # gbce: 0: equals bce, 1: calibrated for the whole catalogue
    windows: Annotated[Literal["last", "all"], OrAuto()] = "last"  # causal, cloze: a user's last window | all windows
    ties: Annotated[Literal["keep", "shuffle"], OrAuto()] = "keep"  # order of a user's events at the same time
    prefixes_per_user: Count = 0  # last, or pretrain of unisrec, s3rec, recformer: prefixes per user and epoch; 0: all
    earliest_target: Annotated[float, Bounds(ge=0, lt=1)] = 0.0  # last: first share of a history, without targets
    user_share: Annotated[float, Bounds(gt=0, le=1)] = 1.0  # share of users to train on, for learning curves
    epoch_steps: Count = 0  # most steps of an epoch, a random part of its batches, for large logs; 0: no limit
    mask_probability: Fraction = 0.2  # cloze: probability of masking an event
    mask_last_share: Share = 0.1  # cloze: share of windows with only the last event masked, as at test
    learning_rate: Annotated[float, Bounds(gt=0), OrAuto()] = 1e-3  # maximum, after the warm-up; cosine decay follows
    min_learning_rate: NotNegative = 1e-5  # final value of the cosine decay
    warmup_steps: Annotated[Count, OrAuto()] = 100  # steps in which the learning rate rises from 0
    weight_decay: NotNegative = 0.0  # weight decay of AdamW, for matrices only
    clip_norm: NotNegative = 1.0  # maximum norm of the gradient; 0: no clipping
    patience: Annotated[Positive, OrAuto()] = 10  # validations without a better valid/ndcg@10 before stopping
    eval_every: Positive = 1  # epochs between validations
    precision: Annotated[Literal["fp32", "bf16"], OrAuto()] = "fp32"  # precision of the forward pass; weights stay fp32
    save_steps: Positive = 500  # steps between resume states; one is also saved after each epoch
    resident: bool = True  # false: events are read from the mapped file, for data larger than memory

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            str(self.learning_rate) == AUTO or self.min_learning_rate <= self.learning_rate,
            "min_learning_rate must be at most learning_rate",
        )
        require(not self.exclude_past or self.loss == "ce", "exclude_past works with loss: ce only")
        require(self.resident or self.ties != "shuffle", "ties: shuffle needs resident: true")
        require(
            not (self.sparse_tables is True and self.loss == "ce"),
            "sparse_tables has no effect with loss: ce, which updates every row; set loss: sampled_ce",
        )
        require(
            not (self.sparse_tables is True and self.weight_decay),
            "sparse_tables needs weight_decay: 0, because weight decay updates every row",
        )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainConfig):
    """Section `pretrain`; models without a pre-training phase use only its seed and `item_vectors`."""

    held_out: Fraction = 0.05  # unisrec, recformer: share of users held out for selecting the weights
    item_vectors: Annotated[Literal["random", "counts"], OrAuto()] = "random"  # initial item table
    use_sources: bool = True  # read the datasets in `sources`, if there are any; false: only the dataset itself
    ruled: ClassVar = ("item_vectors",)  # the only setting that may be auto

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            allowed = value != AUTO or name in self.ruled
            require(allowed, f"{name} cannot be auto in pretrain: only finetune has rules for it")


@dataclass(frozen=True, kw_only=True)
class CountsConfig(Section):
    """The count term of a score; docs/counts.md has the formula."""

    alpha: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0  # weight of the term; 0: none
    kernel: str = "inverse"  # weight by distance: inverse, root, square, or a number b <= 1 for b^(distance - 1)
    window: Annotated[int, Bounds(ge=1, le=1000)] = 10  # maximum distance between two counted events
    across: Annotated[float, Bounds(ge=0, le=1)] = 1.0  # pairs that a pair of events at different times counts as
    smoothing: Annotated[float, Bounds(ge=1e-9)] = 0.3  # tau / |I|: initial count of every pair
    rho: Annotated[float, Bounds(gt=0, le=1)] = 0.65  # weight of an event relative to the next newer one
    events: Annotated[int, Bounds(ge=1, le=1000)] = 10  # number of newest events that are used
    popularity: Annotated[float, Bounds(ge=-1e6, le=1e6)] = (
        0.0  # lambda: weight of the log of an item's share of training events
    )
    targets: Count = 0  # targets kept per item, largest counts first; 0: set by the size of the catalogue
    values: Literal["log", "sum", "rare", "tempered", "ease", "repeats"] = (
        "log"  # log: log(1 + count / tau); the others are those of the baselines
    )
    decay: str = ""  # weight of an event by its distance from the end, in the form of `kernel`; empty: use rho
    ease: NotNegative = 0.0  # weight of EASE, which is added to the term; 0: none
    ease_decay: Annotated[float, Bounds(gt=0, le=1)] = (
        1.0  # weight that EASE gives an event relative to the next newer one
    )
    ease_events: Annotated[int, Bounds(ge=1, le=1000)] = 200  # number of newest events that EASE and repeats read
    repeats: NotNegative = 0.0  # weight of the user's own past items, which is added to the term; 0: none
    repeats_decay: str = "inverse"  # weight that each of them has, in the form of `kernel`

    @property
    def further(self) -> dict[str, CountsConfig]:
        """Settings of the terms that are added, by name."""
        ease = CountsConfig(values="ease", alpha=self.ease, rho=self.ease_decay, events=self.ease_events)
        repeats = CountsConfig(values="repeats", alpha=self.repeats, decay=self.repeats_decay, events=self.ease_events)
        return {name: term for name, term in (("ease", ease), ("repeats", repeats)) if term.alpha}

    def __post_init__(self) -> None:
        super().__post_init__()
        kernels = {"kernel": self.kernel, "decay": self.decay or self.kernel, "repeats_decay": self.repeats_decay}
        for name, value in kernels.items():
            number = value.replace(".", "", 1)
            fits = value in ("inverse", "root", "square") or (number.isdecimal() and float(value) <= 1)
            require(fits, f"{name} must be inverse, root, square or a number up to 1 like 0.7")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """Section `finetune`."""

    counts: str | dict[str, Any] = "none"  # count term: none | auto: chosen on validation | its values
    ease_items: Count = EASE_ITEMS  # largest catalogue for which counts: auto tries EASE, which then takes minutes

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.user_share == 1 or self.counts == "none",
            "user_share: the count term reads every user; set counts: none",
        )
        if isinstance(self.counts, str):
            require(self.counts in ("none", "auto"), "counts must be none, auto, or a mapping of values")
        else:
            parse(CountsConfig, self.counts, "counts")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Section `evaluate`."""

    refit: Literal["none", "valid"] = "none"  # valid: train on the validation events too to rank the test cases
    top_k: Annotated[int, Bounds(ge=10, le=100_000)] = 20  # recommendations written per user; metrics need ten
    bootstrap: Annotated[int, Bounds(ge=100, le=100_000)] = 1000  # resamples of the users for intervals
    seed: Seed = 42  # seed of the resampling


@dataclass(frozen=True, kw_only=True)
class RegisterConfig(Section):
    """Section `register`: where runs are logged, and the conditions for a new champion."""

    tracking_uri: str = "sqlite:///mlflow.db"  # address of MLflow; MLFLOW_TRACKING_URI overrides it
    experiment: str = EXPERIMENT  # name of the MLflow experiment
    min_gain: float = 0.0  # minimum absolute gain of valid/ndcg@10 over the champion
    confidence: Fraction = 0.95  # level of the paired interval of the gain, which must lie above min_gain
    max_loss: NotNegative = 0.1  # share of the champion's coverage, and of its NDCG on tail items, that may be lost
    allow_below_baseline: bool = False  # never make a baseline the candidate, even if it is the best on validation
    graph: bool = True  # add the model's ONNX graph to a version, for faster serving
    examples: Annotated[int, Bounds(ge=0, le=1000)] = 4  # number of users whose recommendations the report shows
    seed: Seed = 42  # seed of choosing these users, and of the gate's resampling


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Section):
    """Section `tune`: the budget of a search, and the settings to search for each model."""

    trials: Positive = 20  # trials per model
    epochs: Count = 0  # epochs per trial; 0: finetune.epochs
    startup_trials: Positive = 5  # random trials at the start; no trial is pruned before that many are complete
    warmup_epochs: Count = 5  # epochs in which no trial is pruned
    seed: Seed = 42  # seed of the search
    # model -> setting (finetune.learning_rate, options.dropout, ...) -> its range
    spaces: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SearchRange:
    """The values of a searched setting: `choices`, or `low` to `high`, whole numbers if both are."""

    low: int | float | None = None  # smallest value
    high: int | float | None = None  # largest value
    log: bool = False  # draw uniformly on a logarithmic scale
    step: int | float | None = None  # step between values, starting from `low`
    choices: list[bool | int | float | str] | None = None  # list of values, instead of a range

    def __post_init__(self) -> None:
        if self.choices is not None:
            require(len(self.choices) > 0, "choices must not be empty")
            require(
                (self.low, self.high, self.log, self.step) == (None, None, False, None),
                "choices cannot be combined with low, high, log or step",
            )
            return
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        require(math.isfinite(self.low) and math.isfinite(self.high), "low and high must be finite numbers")
        require(self.low < self.high, "low must be below high")
        require(not self.log or self.low > 0, "log needs a positive low")
        require(self.step is None or not self.log, "step cannot be combined with log")
        require(
            self.step is None or 0 < self.step <= (self.high - self.low) * (1 + 1e-9),  # .3 - .1 is less than .2
            "step must be positive, and at most high - low",
        )


@dataclass(frozen=True, kw_only=True)
class StepResources(Section):
    """Resources and scheduling of a Kubeflow step's pod; apart from cpu and memory, empty or 0 means not requested."""

    cpu: str = "1"  # cores requested; no limit is set, since it would only slow a step down
    memory: str = "4Gi"  # memory requested, which is also the limit
    gpus: Count = 0  # GPUs per pod
    gpu_type: str = "nvidia.com/gpu"  # resource name of a GPU
    shared_memory: str = ""  # size of /dev/shm, shared by torch's processes
    node_selector: dict[str, str] = field(default_factory=dict)  # labels required of the node
    tolerations: list[dict[str, str]] = field(default_factory=list)  # key, operator, value, effect
    retries: Annotated[int, Bounds(ge=0, le=1000)] = 2  # further attempts after a failure
    backoff_s: Count = 30  # seconds before the first retry, doubled for each further one
    timeout_s: Count = 0  # seconds per attempt

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, form, example in (("cpu", CPU, "2, 0.5 or 500m"), ("memory", BYTES, "4Gi or 1536Mi")):
            value = getattr(self, name)
            fits = bool(form.fullmatch(value)) and bool(re.search("[1-9]", value))
            require(fits, f"{name} must be a quantity above 0 such as {example}, not {value!r:.80}")
        size = self.shared_memory
        require(not size or bool(BYTES.fullmatch(size)), f"shared_memory must be one such as 2Gi, not {size!r:.80}")
        known = ("key", "operator", "value", "effect")
        unknown = [key for one in self.tolerations for key in one if key not in known]
        require(not unknown, f"tolerations: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
        for key, allowed in TOLERATED.items():
            wrong = [one[key] for one in self.tolerations if one.get(key, allowed[0]) not in allowed]
            require(not wrong, f"tolerations: {key} must be one of {', '.join(allowed)}, not {wrong[:1]}")
        check_labels("node_selector", self.node_selector)
        check_labels("gpu_type", {self.gpu_type: ""}, "resource")
        for one in self.tolerations:
            check_labels("tolerations", {one["key"]: one.get("value", "")} if one.get("key") else {}, "taint")


def check_labels(setting: str, labels: Mapping[str, str], kind: str = "label") -> None:
    """Raise ValueError if Kubernetes would refuse a key or a value of `labels`, or of another `kind` of such pairs."""
    for key, value in labels.items():
        prefix, separator, name = key.rpartition("/")
        fits = LABEL.fullmatch(name) and (not separator or NAME.fullmatch(prefix))
        require(bool(fits), f"{setting}: {key!r:.80} is not the key of a {kind}, like pool or nvidia.com/gpu")
        fits = not value or LABEL.fullmatch(value)
        limits = "63 letters, digits, - _ . at most"
        require(bool(fits), f"{setting}.{key}: {value!r:.80} is not the value of a {kind}: {limits}")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """How a step runs work that may be too much for one process."""

    launcher: Literal["step", "job"] = "step"  # in the step's own pod | as a TrainJob or SparkApplication
    nodes: Positive = 1  # pods of the job, or executors of Spark
    processes: Positive = 1  # training processes per node
    runtime: str = "torch-distributed"  # ClusterTrainingRuntime of a TrainJob
    image: str = ""  # image of the job; empty: that of the steps. Spark needs an image with Spark's entry point
    service_account: str = ""  # service account of the job's pods; empty: kubernetes.service_account
    poll_s: PositiveReal = 15.0  # seconds between two polls of the job's status

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.nodes == 1 or self.launcher == "job", "nodes: more than one needs launcher: job")


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig(Section):
    """Section `kubernetes`: resources and environment of the steps on a cluster."""

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)  # step, or default -> its resources
    launch: dict[str, LaunchConfig] = field(default_factory=dict)  # pretrain, finetune or prepare -> how it runs
    state_claim: str = ""  # PersistentVolumeClaim for downloads and resume states; empty: lost with the pod
    data_claim: str = ""  # PersistentVolumeClaim with the files to ingest, mounted at /data
    environment: dict[str, str] = field(default_factory=dict)  # environment variables of every step
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)  # Secret -> its key -> environment variable
    image_pull_secrets: list[str] = field(default_factory=list)  # Secrets for a private registry
    service_account: str = ""  # service account of the run; empty: the cluster's default
    user: int | None = 10001  # user ID of the pods, never root; null: the platform chooses, as OpenShift does
    parallelism: Count = 0  # models that are trained at the same time; 0: all
    labels: dict[str, str] = field(default_factory=dict)  # labels of every pod

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.user is None or self.user >= 1, f"user must be at least 1, or null, not {self.user!r:.80}")
        for name, known in (("launch", LAUNCHED), ("resources", STEPS)):
            for step in set(getattr(self, name)) - set(known):
                raise ValueError(f"{name}.{step}: unknown step; known are {', '.join(known)}")
        jobs = [stage for stage, launch in self.launch.items() if launcher(launch) == "job"]
        require(
            not jobs or bool(self.state_claim),
            f"state_claim is missing: jobs of {', '.join(jobs)} read their data from it",
        )
        if (launch := self.launch.get("prepare")) is not None:
            processes = launch.processes if isinstance(launch, LaunchConfig) else launch.get("processes", 1)
            require(processes == 1, "launch.prepare.processes: prepare runs as one process; set nodes, for Spark")
        check_labels("labels", self.labels)
        variables = [*self.environment, *(name for keys in self.secrets.values() for name in keys.values())]
        names = [*filter(None, [self.service_account]), *self.secrets, *self.image_pull_secrets]
        claims = [*filter(None, (self.state_claim, self.data_claim))]
        for what, form, given in (
            ("an environment variable", VARIABLE, variables),
            ("a resource", NAME, names),
            ("a claim's volume", CLAIM, claims),
        ):
            wrong = [name for name in given if not form.fullmatch(name)]
            require(not wrong, f"{wrong[:1]} cannot be the name of {what} in Kubernetes")
        require(not jobs or self.user is not None, f"user: jobs ({', '.join(jobs)}) need a number, not null")
        for step in self.resources:
            self.step(step)

    def step(self, name: str) -> StepResources:
        """Return the resources of step `name`: its own entry merged over `default`.

        `retries` of `default` is not for the steps in `CERTAIN`.
        """
        shared = {**self.resources.get("default", {}), **({"retries": 0} if name in CERTAIN else {})}
        values = {**shared, **self.resources.get(name, {})}
        return parse(StepResources, values, f"resources.{name}")


def launcher(launch: Any) -> str:
    """Return the launcher of a LaunchConfig, or of a mapping, which it still is without pydantic."""
    return str(launch.launcher if isinstance(launch, LaunchConfig) else launch.get("launcher", "step"))


SECTIONS: dict[str, type] = {
    "ingest": IngestConfig,
    "validate": ValidateConfig,
    "prepare": PrepareConfig,
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "evaluate": EvaluateConfig,
    "register": RegisterConfig,
    "serve": ServeConfig,
    "tune": TuneConfig,
    "kubernetes": KubernetesConfig,
}
DATASET_KEYS = ("ingest", "validate", "prepare", "pretrain", "finetune", "evaluate", "options", "filter_seen")
SWITCHES = {"user_gate": ("user_dropout",), "attribute_values": ("attributes",)}  # and what they switch
MODEL_KEYS = ("architecture", "options", "pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Architecture and options of a model: an entry of `models`, merged with the dataset's options."""

    architecture: str
    options: dict[str, Any]
