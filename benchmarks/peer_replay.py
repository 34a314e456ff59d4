"""RePlay's SasRec in the way that is fastest for it: its modules in a plain loop over padded tensors made beforehand.

Run by peers.py inside RePlay's own environment. Public settings only; attention weights are not dropped, as in the
other contestants, which lets torch's fused kernel compute them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning.postprocessor import SeenItemsFilter
from replay.nn.sequential import LengthBucketedQueryEncoder, SasRec
from torch import Tensor

from benchmarks import meter, peer_data
from benchmarks.peer_data import Histories


def model_of(num_items: int, settings: dict[str, Any]) -> SasRec:
    """Return the model; item i is index i - 1 there, and padding comes last."""
    items = TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=FeatureType.CATEGORICAL,
        embedding_dim=settings["d_model"],
        padding_value=num_items,
        cardinality=num_items,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )
    model = SasRec.from_params(
        TensorSchema([items]),
        embedding_dim=settings["d_model"],
        num_heads=settings["heads"],
        num_blocks=settings["layers"],
        max_sequence_length=settings["length"],
        dropout=settings["dropout"],
    )
    for part in model.modules():
        if isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = settings["attention_dropout"]
    if settings["replay_bucket"]:
        model.body.encoder = LengthBucketedQueryEncoder(model.body.encoder, settings["replay_bucket"])
    return model


def train(
    model: SasRec, histories: Histories, settings: dict[str, Any], bf16: bool, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Train for an epoch; the clock starts after the warm-up steps."""
    padding, size = histories.num_items, settings["batch_size"]
    chosen = histories.train_stop - histories.start >= 2
    window = histories.windows(histories.train_stop, settings["length"] + 1, padding + 1)[chosen] - 1
    window_UL = torch.from_numpy(window)
    batches = torch.randperm(len(window_UL)).split(size)
    model.train()
    targets = 0
    for step, rows in enumerate(batches):
        if step == min(settings["warmup"], len(batches) - 1):
            began, targets = meter.now(), 0
        items_BL, goal_BL = window_UL[rows, :-1], window_UL[rows, 1:]
        real_BL = items_BL != padding  # where there is an input there is a target
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(
                {"item_id": items_BL},
                real_BL,
                positive_labels=goal_BL.unsqueeze(-1),
                target_padding_mask=(goal_BL != padding).unsqueeze(-1),
            )["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        targets += int(real_BL.sum())
    spent = meter.now() - began
    return {"targets": targets, "train_wall": spent.wall, "train_cpu": spent.cpu, "loss": loss.item()}


def rank(
    model: SasRec, histories: Histories, settings: dict[str, Any], bf16: bool
) -> tuple[dict[str, float], np.ndarray]:
    """Return figures, and lists (U, k) of 10 unseen items for every user; making inputs is outside the clock."""
    padding, size = histories.num_items, settings["rank_batch_size"]
    window = torch.from_numpy(histories.windows(histories.valid_stop, settings["length"], padding + 1) - 1)
    batches = []
    for first in range(0, len(window), size):
        part = slice(first, first + size)
        few = histories.of(part)
        longest = int((few.valid_stop - few.start).max())
        seen = few.windows(few.valid_stop, longest, padding + 1) - 1
        batches.append((window[part], {"seen_ids": torch.from_numpy(seen)}))
    unseen = SeenItemsFilter(item_count=padding)

    def best(batches: list[tuple[Tensor, dict[str, Tensor]]]) -> list[Tensor]:
        lists = []
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            for items_BL, seen in batches:
                logits = model({"item_id": items_BL}, items_BL != padding)["logits"]
                lists.append(unseen.on_prediction(seen, logits).topk(settings["top_k"], dim=1).indices)
        return lists

    model.eval()
    best(batches[:2])  # warm-up
    began = meter.now()
    lists = best(batches)
    spent = meter.now() - began
    top_UK = torch.cat(lists).numpy() + 1
    histories.check_unseen(top_UK)
    return {"ranked": len(window), "rank_wall": spent.wall, "rank_cpu": spent.cpu}, top_UK


def main() -> None:
    """Train and rank, or train until validation stops to improve; print the figures as one line of JSON."""
    options = peer_data.arguments()
    settings, bf16 = options.settings, options.precision == "bf16"
    torch.manual_seed(0)
    histories = peer_data.read(options.sequences, options.users)
    model = model_of(histories.num_items, settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)  # RePlay's, but fused
    if settings["patience"]:
        valid = histories.to_validation()
        progress = peer_data.UntilBest(settings["patience"])
        while not progress.over(
            train(model, histories, settings, bf16, optimizer)["train_cpu"],
            valid.ndcg(rank(model, valid, settings, bf16)[1]),
        ):
            pass
        print(json.dumps(progress.epochs))
        return
    figures = train(model, histories, settings, bf16, optimizer) | rank(model, histories, settings, bf16)[0]
    print(json.dumps(figures | {"peak": meter.peak_memory()}))


if __name__ == "__main__":
    main()
