"""The metric of early stopping: NDCG on the validation cases, or in-batch accuracy in a contrastive phase."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from seqrec.data import sequences
from seqrec.data.sequences import Cases, Sequences
from seqrec.evaluation import metrics, ranking
from seqrec.models.base import SequenceModel
from seqrec.models.optional import SelfSupervised

METRIC = "valid/ndcg@10"
ACCURACY = "valid/accuracy"  # in contrastive phases


def validate(
    model: SequenceModel,
    data: Sequences,
    *,
    filter_seen: bool,
    known_U: Tensor | None = None,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Return the metrics on the validation cases; several processes share the work and return the same values.

    `known_U` is passed on to `ranking.model_scorer`.
    """
    chosen = sequences.cases(data, "valid")
    if accelerator is not None:
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        chosen = Cases(user=chosen.user[mine], position=chosen.position[mine])
    was_training = model.training
    model.eval()
    name = type(model).__name__
    scorer = ranking.model_scorer(model, known_U)
    ranked = ranking.rank(scorer, data, chosen, filter_seen=filter_seen, name=name)
    model.train(was_training)
    counts = metrics.histogram(ranked.rank if filter_seen else ranked.rank_unfiltered, data.num_items)
    if accelerator is not None:
        counts = accelerator.reduce(counts)
    values = metrics.from_histogram(counts)
    return {f"valid/{name}": values[name] for name in ("ndcg@10", "recall@10", "mrr")}


@torch.no_grad()
def in_batch_accuracy(
    model: SelfSupervised, data: Sequences, rows: int, accelerator: Accelerator | None = None
) -> dict[str, float]:
    """Return the share of validation cases whose target scores highest among the targets of its block of `rows`."""
    chosen = sequences.cases(data, "valid")
    known = chosen.position > data.start[chosen.user]
    chosen = Cases(user=chosen.user[known], position=chosen.position[known])
    was_training = model.training
    model.eval()
    hits = torch.zeros(2, dtype=torch.int64, device=data.device)
    blocks = torch.arange(len(chosen), device=chosen.user.device).split(rows)
    first, step = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    for block in blocks[first::step]:
        user, position = chosen.user[block], chosen.position[block]
        batch = sequences.window(data, user, position + 1, model.options.length + 1)  # the target is its last event
        hits += torch.stack([model.hits(batch).sum(), torch.tensor(len(block), device=hits.device)])
    model.train(was_training)
    found, number = (hits if accelerator is None else accelerator.reduce(hits)).tolist()
    return {ACCURACY: found / max(1, number)}
