"""Do FLASH4Rec's experts know different things? Ranks with trained experts, and with other ones than the router chose.

Trains the first row of configs/flash4rec/parts.yaml with each seed, unless that is done, and ranks the test cases as
trained, with each event's expert replaced, and without experts. An interrupted run continues if it is started again.

    python scripts/flash4rec_routing.py --out runs/flash4rec-routing --seeds 42,43,44
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from seqrec.artifacts import write_text
from seqrec.commands.benchmark import benchmark
from seqrec.data import sequences
from seqrec.evaluation import intervals, metrics, ranking
from seqrec.models.flash4rec import Experts
from seqrec.training.checkpoint import load_checkpoint

CONFIG = Path(__file__).parent.parent / "configs/flash4rec/parts.yaml"
ROW = "flash4rec"
Routing = tuple[Tensor, Tensor]  # of each event: the weight of its expert, and the expert
CHOICES: dict[str, Callable[[Tensor, Tensor, int], Routing]] = {
    "as trained": lambda gate, expert, _: (gate, expert),
    "the expert of another event": lambda gate, expert, _: (gate, expert[torch.randperm(len(expert))]),
    "a random expert": lambda gate, expert, experts: (gate, torch.randint(experts, expert.shape)),
    "the busiest expert for all": lambda gate, expert, _: (gate, expert.mode(0, keepdim=True).values.expand_as(expert)),
    "no expert": lambda gate, expert, _: (gate.zero_(), expert),
}


@torch.no_grad()
def ndcg(out: Path, seed: int, choice: Callable[[Tensor, Tensor, int], Routing]) -> np.ndarray:
    """Return NDCG@10 of each test case, with experts chosen by `choice` in every layer."""
    model = load_checkpoint(out / f"seed-{seed}/artifacts" / ROW / "finetuned").model.eval()
    data = sequences.load(out / "data/sequences")
    routed = Experts._gates

    def gates(experts: Experts, logits_NX: Tensor, share_NX: Tensor) -> Routing:
        return choice(*routed(experts, logits_NX, share_NX), share_NX.shape[1])

    torch.manual_seed(seed)
    with mock.patch.object(Experts, "_gates", gates):
        ranked = ranking.rank(ranking.model_scorer(model), data, sequences.cases(data, "test"), filter_seen=True)
    return metrics.ndcg(ranked.rank.numpy(), 10)


def table(out: Path, seeds: list[int]) -> str:
    """Return the choices as Markdown; intervals cover other users and other seeds."""
    data = sequences.load(out / "data/sequences")
    user = sequences.cases(data, "test").user.numpy()
    found = {name: np.stack([ndcg(out, seed, choice) for seed in seeds]) for name, choice in CHOICES.items()}
    base = found["as trained"]
    lines = [
        f"Split {data.card['split_sha256'][:12]}",
        "",
        "| experts | test NDCG@10 | difference [95 %] |",
        "|---|--:|---|",
    ]
    for name, value in found.items():
        gain = intervals.pigeonhole_bootstrap(value - base, user, seed=42)
        shown = "-" if value is base else str(gain)
        lines.append(f"| {name} | {value.mean():.4f} ± {np.std(value.mean(1), ddof=1):.4f} | {shown} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Train what is missing, write the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/flash4rec-routing"))
    parser.add_argument("--seeds", default="42,43,44", help="two at least")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("seqrec").setLevel(logging.INFO)
    benchmark(config_file=CONFIG, out=arguments.out, seeds=arguments.seeds, only=ROW, base=ROW)
    text = table(arguments.out, [int(seed) for seed in arguments.seeds.split(",")])
    write_text(arguments.out / "routing.md", text)
    print(text)


if __name__ == "__main__":
    main()
