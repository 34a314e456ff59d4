"""Our SASRec through the real engine: `train.train`, then `ranking.rank`.

Run by peers.py in this project's environment, like every contestant in a process of its own.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import meter, peer_data
from benchmarks.meter import Cost
from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.evaluation import ranking
from seqrec.models import Catalogue
from seqrec.models.sasrec import SASRec
from seqrec.training.train import Training
from seqrec.training.train import train as run_training
from seqrec.training.validation import validate

TIMED_EPOCH = 1  # counted from 0: the one before warms up, the one after ends with an evaluation


def load(directory: Path, users: int) -> Sequences:
    """Read the prepared dataset, its first `users` users (0 = all)."""
    data = sequences.load(directory)
    names = ("start", "train_stop", "valid_start", "valid_stop", "stop")
    return replace(data, **{name: getattr(data, name)[: users or None] for name in names})


def model_of(data: Sequences, settings: dict[str, Any]) -> SASRec:
    """Return the model with new weights."""
    names = ("length", "d_model", "layers", "heads", "dropout", "attention_dropout")
    options = SASRec.Options(**{name: settings[name] for name in names})
    return SASRec(options, Catalogue(data.num_items, data.num_users, options.length))


def train(model: SASRec, data: Sequences, settings: dict[str, Any], precision: str) -> dict[str, float]:
    """Train for three epochs; time the second from its start to the start of the third, resume state included."""
    config = FinetuneConfig(
        epochs=3,
        eval_every=3,
        batch_size=settings["batch_size"],
        learning_rate=1e-3,
        warmup_steps=0,
        clip_norm=0.0,
        precision=precision,
    )
    started: list[Cost] = []
    model.on_epoch = lambda: started.append(meter.now())  # the engine calls it at the start of each epoch
    with tempfile.TemporaryDirectory() as folder:
        training = Training(
            name="sasrec",
            stage="finetune",
            config=config,
            inputs=[],
            output=Path(folder) / "output",
            state=Path(folder) / "state",
            filter_seen=True,
        )
        run_training(model, data, training)
        history = (Path(folder) / "output" / "history.jsonl").read_text().splitlines()
    spent = started[TIMED_EPOCH + 1] - started[TIMED_EPOCH]
    targets = int((data.train_stop - data.start - 1).clamp(0, settings["length"]).sum())
    loss = json.loads(history[TIMED_EPOCH])["loss"]
    return {"targets": targets, "train_wall": spent.wall, "train_cpu": spent.cpu, "loss": loss}


def rank(model: SASRec, data: Sequences, settings: dict[str, Any]) -> tuple[dict[str, float], torch.Tensor]:
    """Recommend 10 unseen items to every user; return the figures and the lists (U, 10)."""
    cases = sequences.cases(data, "test")
    model.eval()

    def top(cases: sequences.Cases) -> torch.Tensor:
        scorer = ranking.model_scorer(model)
        return ranking.rank(scorer, data, cases, filter_seen=True, top_k=settings["top_k"]).top

    top(sequences.Cases(cases.user[:256], cases.position[:256]))  # warm-up
    began = meter.now()
    lists = top(cases)
    spent = meter.now() - began
    return {"ranked": len(cases), "rank_wall": spent.wall, "rank_cpu": spent.cpu}, lists


def evaluate(model: SASRec, data: Sequences) -> dict[str, float]:
    """Time what the engine does after an epoch."""
    spent = meter.cost_of(lambda: validate(model, data, filter_seen=True))
    return {"evaluate_wall": spent.wall, "evaluate_cpu": spent.cpu}


def main() -> None:
    """Train and rank; print the figures as one line of JSON."""
    options = peer_data.arguments()
    torch.manual_seed(0)
    data = load(options.sequences, options.users)
    model = model_of(data, options.settings)
    figures = train(model, data, options.settings, options.precision)
    ranked, lists = rank(model, data, options.settings)
    peer_data.read(options.sequences, options.users).check_unseen(lists.numpy())
    print(json.dumps(figures | ranked | evaluate(model, data) | {"peak": meter.peak_memory()}))


if __name__ == "__main__":
    main()
