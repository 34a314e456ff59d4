"""What masks and the Jacobian penalty cost a training step, at the shapes of MovieLens-1M.

  python -m benchmarks.rec_denoiser_cost --backbone sasrec

prints a markdown table. Items are random: a step's work does not depend on which they are. The variants take turns, so
that a machine with other work slows all of them alike.

  python -m benchmarks.rec_denoiser_cost --serve

instead shows what a sparse mask could save when queries are served. A mask multiplies weights after the softmax, whose
denominator needs every key: no score, hence no key and nothing below it, can be left out. What can be left out is the
value of a key that no query uses. The bound leaves out all values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from seqrec.models.base import Batch, Catalogue, SequenceModel
from seqrec.models.layers import MultiHeadAttention
from seqrec.models.rec_denoiser import BACKBONES, RecDenoiser, RecDenoiserOptions
from seqrec.training import losses
from seqrec.training.loop import keep_freed_memory

ITEMS, USERS, LENGTH, BATCH = 3416, 6040, 50, 128
PLAIN = {"attention": "full", "l0": 0.0, "jacobian": 0.0}
VARIANTS: dict[str, dict[str, object]] = {  # options of the denoiser
    "backbone, fused attention": PLAIN,
    "backbone, explicit attention": PLAIN,
    "AR": {"estimator": "ar", "baseline": "loo", "jacobian": 0.0},
    "ARM": {"jacobian": 0.0},
    "Jacobian, a quarter of the batch": PLAIN | {"jacobian": 0.001},
    "AR + Jacobian": {"estimator": "ar", "baseline": "loo"},
    "ARM + Jacobian": {},
    "ARM + Jacobian, the whole batch": {"jacobian_share": 1.0},
}


def build(backbone: str, name: str, d_model: int) -> SequenceModel:
    """Return a variant, in training mode."""
    objective = "cloze" if backbone == "bert4rec" else "causal"
    shapes = {"length": LENGTH, "d_model": d_model, "backbone": backbone, "objective": objective}
    model = RecDenoiser(RecDenoiserOptions(**shapes, **VARIANTS[name]), Catalogue(ITEMS, USERS, LENGTH))  # type: ignore[arg-type]
    if "explicit" in name:
        for block in model.blocks:
            block.attention.weigh = nn.Softmax(-1)
    return model.train()


def stepper(model: SequenceModel, loss: str) -> Callable[[], None]:
    """Return a function that trains `model` for one step."""
    items = torch.randint(1, ITEMS + 1, (BATCH, LENGTH))
    times = torch.arange(1 - LENGTH, 1).float().mul(60).repeat(BATCH, 1)
    batch = Batch(items, times, torch.randint(1, USERS + 1, (BATCH,)))
    # of the windows' positions, cloze has a target at about a fifth
    targets = torch.arange(BATCH * LENGTH)[:: 5 if model.options.objective == "cloze" else 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def task(query_BLD: Tensor) -> Tensor:
        query_ND, target_N = query_BLD.flatten(0, 1)[targets], items.flatten()[targets]
        if loss == "ce":
            value_N = losses.cross_entropy(query_ND, model.item_vectors(), target_N)
        else:
            negative = torch.randint(1, ITEMS + 1, (len(target_N), 1))
            value_N = losses.binary_cross_entropy(query_ND, model.item_vectors(), target_N, negative)
        return torch.zeros(BATCH).index_add(0, targets // LENGTH, value_N) / len(targets)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(model.training_loss(batch, task).values())).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class WithoutValues(MultiHeadAttention):
    """Attention that computes weights and uses none: what would be left if a mask dropped every key."""

    def forward(self, query_BQD: Tensor, source_BLD: Tensor, bias_BQL: Tensor) -> Tensor:
        """Return (B, Q, D), of no meaning."""
        q_BHQK, k_BHLK = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_query(query_BQD), self.to_key(source_BLD))
        )
        weight_BHQL = self.weights(q_BHQK * q_BHQK.shape[-1] ** -0.5 @ k_BHLK.mT, bias_BQL)
        out: Tensor = self.to_out(query_BQD * weight_BHQL[:, 0, :, :1])
        return out


def servers(d_model: int) -> dict[str, Callable[[], None]]:
    """Return functions that serve a batch of users: with masks of some sparsity, and the bound."""
    catalogue = Catalogue(ITEMS, USERS, LENGTH)
    batch = Batch(torch.randint(1, ITEMS + 1, (BATCH, LENGTH)), torch.zeros(BATCH, LENGTH), torch.ones(BATCH).long())
    found = {}
    for name in ("fused attention, no mask", "mask, none dropped", "mask, 90 % dropped", "no values at all (bound)"):
        plain = PLAIN if "mask," not in name else {}
        options = RecDenoiserOptions(length=LENGTH, d_model=d_model, **plain)  # type: ignore[arg-type]
        model = RecDenoiser(options, catalogue).eval()
        for block in model.blocks:
            if "bound" in name:
                block.attention = WithoutValues(d_model, options.heads, 0.0)
            elif "90 %" in name:
                with torch.no_grad():
                    block.attention.weigh.raw_XLL.bernoulli_(0.9).neg_()
        found[name] = partial(torch.no_grad()(model), batch, last=True)
    return found


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number >= 2:  # the first ones allocate
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=BACKBONES, default="sasrec")
    parser.add_argument("--loss", choices=("ce", "bce"), default="ce", help="ce: full softmax; bce: one negative")
    parser.add_argument("--d-model", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help="time serving, not training")
    flags = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    if flags.serve:
        print(f"sasrec, d = {flags.d_model}, n = {LENGTH}, {BATCH} users, threads: {torch.get_num_threads()}\n")
        print("| served with | ms a batch |\n|---|---|")
        for name, value in measure(servers(flags.d_model), flags.rounds).items():
            print(f"| {name} | {1000 * value:.1f} |")
        return
    steps = {name: stepper(build(flags.backbone, name, flags.d_model), flags.loss) for name in VARIANTS}
    seconds = measure(steps, flags.rounds)
    explicit = seconds["backbone, explicit attention"]
    shapes = f"d = {flags.d_model}, n = {LENGTH}, batch {BATCH}"
    print(f"{flags.backbone}, {flags.loss}, {shapes}, threads: {torch.get_num_threads()}\n")
    print("| variant | ms a step | s an epoch | of explicit |\n|---|---|---|---|")
    for name, value in seconds.items():
        epoch = value * USERS / BATCH  # a window a user
        print(f"| {name} | {1000 * value:.1f} | {epoch:.2f} | {value / explicit:.2f} |")


if __name__ == "__main__":
    main()
