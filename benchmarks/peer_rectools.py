"""RecTools' SASRecModel with the softmax loss, trained and ranked by its own trainer and its own torch ranking.

Run by peers.py inside RecTools' own environment. Public settings only; attention weights are not dropped, as in the
other contestants, which lets torch's fused kernel compute them. Its data preparation is outside the clock.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as lightning
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

from benchmarks import meter, peer_data
from benchmarks.peer_data import Histories


class Clock(lightning.Callback):
    """Times the steps of an epoch after the warm-up and counts their targets."""

    over: Callable[[float], bool] | None = None  # of an epoch's CPU seconds; the trainer's own settings are plain data

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.began = self.spent = meter.now()
        self.targets = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Set the dropout of the attention weights, for which the model has no option of its own."""
        for part in module.modules():
            if isinstance(part, torch.nn.MultiheadAttention):
                part.dropout = self.settings["attention_dropout"]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Start the clock once."""
        if batch_idx == min(self.settings["warmup"], trainer.num_training_batches - 1):
            self.began, self.targets = meter.now(), 0
        self.targets += int((batch["y"] != 0).sum())

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock; the last call counts."""
        self.spent = meter.now() - self.began

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Validate, where training goes on until validation stops to improve."""
        if self.over is not None:
            module.eval()
            trainer.should_stop = self.over(self.spent.cpu)
            module.train()


def trainer(precision: str, settings: dict[str, Any]) -> lightning.Trainer:
    """Return a trainer that does nothing but train: for one epoch, or until `Clock.over`."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=500 if settings["patience"] else 1,
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
        callbacks=[Clock(settings)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def events(histories: Histories, stop: np.ndarray) -> Dataset:
    """Return every user's events before `stop` (U,) as RecTools' dataset; the place in the history is the time."""
    number = stop - histories.start
    user = np.repeat(np.arange(len(number)), number)
    place = np.arange(len(user)) - np.repeat(number.cumsum() - number, number)
    table = {
        Columns.User: user,
        Columns.Item: histories.items[histories.start[user] + place],
        Columns.Weight: 1.0,
        Columns.Datetime: pd.to_datetime(place, unit="s"),
    }
    return Dataset.construct(pd.DataFrame(table))


def rank(model: SASRecModel, histories: Histories, settings: dict[str, Any]) -> tuple[dict[str, float], np.ndarray]:
    """Return figures and lists (U, k) of 10 unseen items for every user; the clock excludes RecTools' preparation."""
    dataset = events(histories, histories.valid_stop)
    users = np.arange(len(histories.start))
    few = users[: 2 * settings["rank_batch_size"]]
    model.recommend(few, dataset, k=settings["top_k"], filter_viewed=True)  # warm-up

    # the parts of the public `recommend`; it does not offer them one by one
    prepared = model._custom_transform_dataset_u2i(dataset, users, "raise")
    loader = model.data_preparator.get_dataloader_recommend(prepared, settings["rank_batch_size"])
    internal = prepared.user_id_map.convert_to_internal(users)
    candidates = model.data_preparator.get_known_items_sorted_internal_ids()
    began = meter.now()
    user, item, _ = model.lightning_model._recommend_u2i(
        internal, loader, candidates, settings["top_k"], prepared, filter_viewed=True, torch_device="cpu"
    )
    spent = meter.now() - began
    top = prepared.item_id_map.convert_to_external(item).reshape(len(users), settings["top_k"])
    owner = prepared.user_id_map.convert_to_external(np.asarray(user)).reshape(top.shape)[:, 0]
    top = top.astype(np.int64)[np.argsort(owner.astype(np.int64))]
    histories.check_unseen(top)
    return {"ranked": len(users), "rank_wall": spent.wall, "rank_cpu": spent.cpu}, top


def main() -> None:
    """Train and rank, or train until validation stops to improve; print the figures as one line of JSON."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    options = peer_data.arguments()
    settings = options.settings
    lightning.seed_everything(0, verbose=False)
    histories = peer_data.read(options.sequences, options.users)
    model = SASRecModel(
        n_blocks=settings["layers"],
        n_heads=settings["heads"],
        n_factors=settings["d_model"],
        dropout_rate=settings["dropout"],
        session_max_len=settings["length"],
        batch_size=settings["batch_size"],
        recommend_batch_size=settings["rank_batch_size"],
        loss="softmax",
        use_causal_attn=True,
        get_trainer_func=trainer,
        get_trainer_func_kwargs={"precision": options.precision, "settings": settings},
    )
    dataset = events(histories, histories.train_stop)
    progress, valid = peer_data.UntilBest(settings["patience"]), histories.to_validation()

    def over(seconds: float) -> bool:
        model.is_fitted = True  # during the fit
        return progress.over(seconds, valid.ndcg(rank(model, valid, settings)[1]))

    if settings["patience"]:
        Clock.over = staticmethod(over)
    model.fit(dataset)
    if settings["patience"]:
        print(json.dumps(progress.epochs))
        return
    clock = model.fit_trainer.callbacks[0]
    figures = {"targets": clock.targets, "train_wall": clock.spent.wall, "train_cpu": clock.spent.cpu}
    figures["loss"] = float(model.fit_trainer.callback_metrics["train_loss"])
    print(json.dumps(figures | rank(model, histories, settings)[0] | {"peak": meter.peak_memory()}))


if __name__ == "__main__":
    main()
