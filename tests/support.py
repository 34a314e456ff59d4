"""Tiny real objects and small runs that several tests use."""

from __future__ import annotations

import copy
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from seqrec import artifacts
from seqrec.artifacts import sha256, write_json, write_table
from seqrec.config import FinetuneConfig, ModelConfig, PrepareConfig, PretrainConfig
from seqrec.counts import term
from seqrec.data import item_tokens, sequences
from seqrec.models import REGISTRY
from seqrec.models.base import Batch, Catalogue, Options
from seqrec.models.ensemble import create
from seqrec.pipeline import BASELINES
from seqrec.stages.finetune import finetune
from seqrec.stages.prepare import prepare
from seqrec.stages.pretrain import pretrain
from seqrec.training import batches
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_counts, save_model
from seqrec.training.resume import ResumeState

ROOT = Path(__file__).parent.parent

# Facts about an architecture that its class does not tell; one that is not named has none.
SMALL: dict[str, dict] = {"recformer": {"d_inner": 32}}  # options that a small model of it needs
ITEMS = {"encoder": "items", "pooling": "mean", "layers": 0, "d_history": 16, "history_dropout": 0.0}  # a Recformer
MEMORY = {"fpmc": 1, "mfbpr": 0}  # most recent events that a query depends on, where that is not all of them


FILTERED = tuple(name for name in BASELINES if name != "repeats")  # the baselines with filter_seen


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are the same in every run."""
    measured = ("train_seconds", "evaluate_seconds", "train_peak_mb")
    return {name: value for name, value in metrics.items() if name not in measured}


def nothing(data, user, _):
    """A scorer that gives every item 0."""
    return lambda: iter([(1, torch.zeros(len(user), data.num_items))])


def trained(*objectives: str) -> list[tuple[str, str]]:
    """Every (architecture, objective) that can be trained, of these `objectives`."""
    return [(name, o) for name in sorted(REGISTRY) for o in objectives if o in REGISTRY[name].objectives]


def has_option(architecture: str, name: str) -> bool:
    return name in {field.name for field in fields(REGISTRY[architecture].Options)}


def make_model(architecture: str, *, num_items: int = 30, num_users: int = 8, length: int = 12, **options):
    cls = REGISTRY[architecture]
    shared = {"d_model": 16, "length": length}
    small = {name: value for name, value in shared.items() if has_option(architecture, name)}
    options = small | SMALL.get(architecture, {}) | options
    if architecture == "recformer" and options.get("objective") == "causal":
        options = ITEMS | options
    chosen = cls.Options(**options)
    tokens = make_tokens(num_items) if {"text", "attributes"} & cls.needs_of(chosen) else None
    model = create(cls, chosen, Catalogue(num_items, num_users, length, tokens))
    if architecture == "recformer":  # untrained, all its items are all but the same
        add_noise(model, 0.3)
        model.refresh()
    return model


@torch.no_grad()
def add_noise(model: torch.nn.Module, scale: float) -> None:
    """Give every parameter, biases and normalisations too, values that matter."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=scale)


def make_tokens(num_items: int) -> dict[str, torch.Tensor]:
    """Tokens, attributes and text vectors: item i has a name and 1 to 3 tokens of a value that no other item has."""
    sizes = 2 + torch.arange(num_items) % 3
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (2, 0))
    first = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    first[offsets[1:-1]] = True
    ids = torch.where(first, 4, torch.arange(len(first)) + 5)
    return {
        "ids": ids.int(),
        "types": torch.where(first, 1, 2).to(torch.int8),
        "starts": torch.ones_like(first),
        "offsets": offsets,
        "special": torch.tensor([0, 2, 3, len(first) + 5]),
        "values": torch.tensor([[0, 0, 0], *([1 + n % 5, n // 5 + 6, 0] for n in range(num_items))], dtype=torch.int32),
        "vectors": torch.nn.functional.normalize(torch.randn(num_items + 1, 24), dim=-1),
    }


def make_batch(rows: list[list[int]], *, user: int = 1) -> Batch:
    """Left-pad `rows` of items; one event a minute."""
    length = max(len(row) for row in rows)
    items = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    times = torch.arange(1 - length, 1).double().mul(60).repeat(len(rows), 1).masked_fill(items == 0, 0)
    return Batch(items, times, torch.full((len(rows),), user))


def write_interactions(folder: Path, rows: list[tuple[str, str, int]], ratings: Sequence[float] = ()) -> None:
    """Write (user_id, item_id, timestamp) rows, with or without ratings, as an ingested and validated dataset."""
    users, items, times = ([row[i] for row in rows] for i in range(3))
    columns = [users, items, times, list(range(len(rows))), ratings or [None] * len(rows)]
    arrays = [pa.array(c, type=f.type) for c, f in zip(columns, artifacts.INTERACTIONS_SCHEMA, strict=True)]
    write_table(folder / artifacts.INTERACTIONS, pa.table(arrays, schema=artifacts.INTERACTIONS_SCHEMA))
    titles = sorted(set(items))
    item_table = pa.table([titles, [f"Title of {item}" for item in titles]], schema=artifacts.ITEMS_SCHEMA)
    write_table(folder / artifacts.ITEMS, item_table)
    verdict = {"success": True, "input_sha256": sha256(folder / artifacts.INTERACTIONS)}
    write_json(folder / "validation.json", verdict)


def synthetic_rows(users: int = 60, items: int = 40, events: int = 15, seed: int = 0) -> list[tuple[str, str, int]]:
    """A log with a pattern to learn: the next item is mostly the previous one plus one."""
    generator = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        item = int(generator.integers(items))
        for event in range(events + int(generator.integers(5))):
            rows.append((f"u{user}", f"i{item}", 1_000_000 + 1000 * event + user))
            item = (item + 1) % items if generator.random() < 0.8 else int(generator.integers(items))
    return rows


def prepare_rows(folder, rows, dataset="synthetic", ratings=(), **config) -> Path:
    """Return the folder of the prepared dataset made from `rows`; see `write_interactions`."""
    write_interactions(folder, rows, ratings)
    prepare(
        dataset=dataset,
        data=folder,
        validation=folder / "validation.json",
        sequences=folder / "sequences",
        config=PrepareConfig(**config),
    )
    return folder / "sequences"


FACTS = {"model": "model", "fingerprint": "", "seconds": 0.0, "filter_seen": True, "median_gap": 86_400.0}


def save(architecture, prepared, folder, counts=None, options=None, **card):
    """An untrained model as serving finds it; with the count term of the values `counts`, if given."""
    data = sequences.load(prepared)
    model = make_model(architecture, num_items=data.num_items, num_users=data.num_users, **(options or {}))
    if counts is not None:
        folder.mkdir(parents=True, exist_ok=True)
        card["counts"] = save_counts(folder, term.build(data, counts), asdict(counts))
    items = prepared.parent / artifacts.ITEMS
    save_model(folder, model, {**FACTS, **card}, catalogue_files(prepared, items))
    return folder


OPTIONS = {
    "sasrec": {"d_model": 16, "length": 12, "dropout": 0.2},
    "flash4rec": {"d_model": 16, "d_shared": 8, "d_value": 16, "d_expert": 16, "length": 12, "topk_dropout": 0.3},
}


CONFIG = {"epochs": 4, "batch_size": 16, "warmup_steps": 5, "learning_rate": 5e-3, "patience": 9}


def save_bert(texts: item_tokens.Texts, folder: Path) -> tuple[str, Tokenizer]:
    """Write a tiny BERT of random weights that reads `texts`; return its place and its tokeniser."""
    import transformers  # takes seconds, and few tests need it

    tokenizer = item_tokens.train_tokenizer([texts], 200)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=tokenizer.get_vocab_size(), **sizes))
    bert.save_pretrained(folder)
    tokenizer.save(str(folder / artifacts.TOKENIZER))
    return str(folder), tokenizer


def run(prepared, out, model="sasrec", options=None, log=None, refit="none", filter_seen=True, **config):
    shared = {"model": model, "sequences": prepared, "initial": out / "initial", "state": out / "state"}
    architecture = ModelConfig(architecture=model, options=OPTIONS.get(model, {}) | (options or {}))
    start = {"data": out, "architecture": architecture, "config": PretrainConfig(seed=1)}  # without a table of items
    pretrain(**shared, **start, filter_seen=filter_seen)
    settings = FinetuneConfig(**(CONFIG | config))
    shared |= {"checkpoint": out / "finetuned", "filter_seen": filter_seen}
    return finetune(**shared, config=settings, refit=refit, log=log)


def run_pretrain(model, dataset, out, options, sources=(), champion=None, architecture=None, **config):
    """Pre-train on the dataset in the folder `dataset`, with its items' text."""
    return pretrain(
        model=model,
        sequences=dataset / "sequences",
        initial=out / "initial",
        state=out / "state",
        architecture=ModelConfig(architecture=architecture or model, options=options),
        filter_seen=True,
        config=PretrainConfig(**config),
        data=dataset,
        sources=sources,
        champion=champion,
    )


def run_finetune(model, dataset, out, **config):
    return finetune(
        model=model,
        sequences=dataset / "sequences",
        initial=out / "initial",
        checkpoint=out / "finetuned",
        state=out / "state",
        filter_seen=True,
        config=FinetuneConfig(**config),
    )


@contextmanager
def interrupted(step: int):
    """Let a training die right after the resume state of `step` was written."""
    save = ResumeState.save

    def dying(self, number, values):
        save(self, number, values)
        if number == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumeState, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            yield


def exit_of(function, *arguments) -> int:
    """Return the exit status of a fork of this process that calls `function`; a negative one is that of a signal."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def weights(out):
    return load_checkpoint(out / "finetuned").model.state_dict()


def losses_of(out):
    lines = (out / "finetuned" / "history.jsonl").read_text().splitlines()
    timed = ("seconds", "targets_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


@contextmanager
def running(service):
    """Run `service` on a free port in a thread; yield its address."""
    import uvicorn  # not needed on a GPU machine that has the training core alone

    server = uvicorn.Server(uvicorn.Config(service, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def service(recommender, *, version="7", store=None, candidate=None, **options):
    """Run a service of `recommender` with these options of `serve`; yield its address."""
    from seqrec.config import ServeConfig
    from seqrec.serving import http  # few tests need it

    config = ServeConfig(**options)
    return running(http.app(lambda: recommender, lambda: version, config, store=store, candidate=candidate))


class Quiet:
    """What a handler of requests need not log, and answers in JSON."""

    def log_message(self, *_):
        pass

    def answer(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def listening(handler):
    """Let `handler` answer on a free port in a thread; yield the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def until(condition):
    """Return the first true value of `condition`; fail after a minute without one."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_values(content: dict, changes: dict) -> dict:
    """Return a copy of nested settings with the values of dotted keys set."""
    content = copy.deepcopy(content)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return content


def paths(content, before: tuple = ()) -> list[tuple]:
    """Return the path of everything in a nested dict."""
    found = [before] if before else []
    if isinstance(content, dict):
        for key, value in content.items():
            found += paths(value, (*before, key))
    return found


YEAR_2001 = 978_307_200


def write_log(path: Path, rows: list[tuple[str, str, int]], *, start: int = 0) -> Path:
    """Write (user_id, item_id, timestamp) rows as a log of a user's own."""
    lines = [f"{user},{item},{start + time}\n" for user, item, time in rows]
    path.write_text("".join(["user_id,item_id,timestamp\n", *lines]))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def counts_by_loop(data, weights, across=1.0):
    """Return how often each item follows another in training, weighted by distance, one pair of events at a time."""
    counted = np.zeros((len(data.count), len(data.count)))
    for user in range(data.num_users):
        train = slice(data.start[user], data.train_stop[user])
        events = list(zip(data.items[train].tolist(), data.times[train].tolist(), strict=True))
        for place, (item, earlier) in enumerate(events):
            for weight, (later, at) in zip(weights, events[place + 1 :], strict=False):
                counted[item, later] += weight if at == earlier else weight * across
    return counted


def case_table(*ranks: float, split: str = "valid") -> pa.Table:
    """Return one case a user, with these ranks."""
    rows = [
        {"split": split, "user": user, "position": 3, "target": 1, "rank": float(rank), "ties": 0}
        for user, rank in enumerate(ranks, start=1)
    ]
    return pa.Table.from_pylist(rows, schema=artifacts.CASES_SCHEMA)


def write_settings(folder: Path, *, start: int, models: Sequence[str] = ("sasrec", "flash4rec")) -> Path:
    """Write a log of 50 users that begins at `start`, and settings that train the `models` on it; return the latter."""
    small = {"d_model": 16, "layers": 1, "length": 12}
    entries = {
        "sasrec": {"options": small | {"heads": 2}},
        "flash4rec": {
            "options": small | {"d_shared": 8, "d_value": 16, "d_expert": 16},
            "finetune": {"learning_rate": 0.002},
        },
    }
    log = write_log(folder / "log.csv", synthetic_rows(users=50), start=start)
    settings = folder / "settings.yaml"
    content = {
        "dataset": "own",
        "leaderboard": list(models),
        "ingest": {"source": "csv", "interactions": str(log)},
        "finetune": {"epochs": 1, "batch_size": 16, "warmup_steps": 1},
        "evaluate": {"bootstrap": 100},
        "register": {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "allow_below_baseline": True, "graph": False},
        "kubernetes": {"resources": {"default": {"retries": 0}}},
        "models": {name: entries[name] for name in models},
    }
    settings.write_text(yaml.safe_dump(content))
    return settings


KUBERNETES = {  # a section of params.yaml
    "resources": {
        "default": {"cpu": "2", "memory": "8Gi", "retries": 3, "backoff_s": 60},
        "finetune": {
            "cpu": "4",
            "memory": "64Gi",
            "gpus": 1,
            "shared_memory": "8Gi",
            "timeout_s": 3600,
            "node_selector": {"pool": "gpu"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    },
    "state_claim": "seqrec-state",
    "data_claim": "seqrec-data",
    "environment": {"OMP_NUM_THREADS": "1"},
    "secrets": {"seqrec": {"tracking-password": "MLFLOW_TRACKING_PASSWORD"}},
    "image_pull_secrets": ["registry"],
    "service_account": "seqrec",
    "labels": {"team": "search"},
}


EPOCH_RECORDS = [
    {"phase": "train", "epoch": 1, "loss": 6.0, "valid/ndcg@10": 0.1, "loss/task": 5.5, "figure/entropy": 1.25},
    {"phase": "train", "epoch": 2, "loss": 5.0, "loss/task": 4.5, "figure/entropy": 1.0},
    {"phase": "hard", "epoch": 1, "loss": 4.5, "valid/ndcg@10": 0.2, "loss/task": 4.0, "figure/entropy": 0.75},
]


def write_cluster_settings(folder):
    """Write the settings of a tiny log for a cluster, whose steps have a tracking server."""
    settings = write_settings(folder, start=YEAR_2001)
    content = yaml.safe_load(settings.read_text())
    content["kubernetes"]["environment"] = {"MLFLOW_TRACKING_URI": "http://mlflow.example.org"}
    settings.write_text(yaml.safe_dump(content))
    return settings


def row(model, *, baseline=False):
    return {
        "model": model,
        "baseline": baseline,
        "test/ndcg@10": 0.2,
        "test/ndcg@10/low": 0.18,
        "test/ndcg@10/high": 0.23,
        "test/coverage@10": 0.6,
    }


def draw_windows(data, *, seed=0, length=5, objective="causal", **config):
    """Return options of a model, and the windows of one of its epochs."""
    options = Options(length=length, objective=objective)
    generator = torch.Generator().manual_seed(seed)
    return options, batches.windows(data, options, FinetuneConfig(**config), generator)


def linear_rgb(colour):
    """The light of a colour by channel, as WCAG 2 computes it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels])


def contrast(first, second):
    """The ratio of light of two colours, from 1 to 21, as WCAG 2 computes it."""
    bright, dark = sorted((linear_rgb(colour) @ [0.2126, 0.7152, 0.0722] for colour in (first, second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


MODULES = "import sys; from seqrec.__main__ import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"


def imported(*arguments: str) -> set[str]:
    """Return the packages and modules that `python -m seqrec ARGUMENTS` imports."""
    command = [sys.executable, "-c", MODULES, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.split())
