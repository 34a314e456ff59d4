"""Do the masks of Rec-Denoiser help against noise? A share of the training items is replaced by random ones.

Each draw has its own noise and its own seed of training. Every row of a draw is trained on the same noisy data, and
ranks the test cases of the data without noise. An interrupted run continues if it is started again; the table has the
shares and draws of the command.

    python scripts/rec_denoiser_noise.py --out runs/rec-denoiser-noise --seeds 42,43,44,45,46
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqrec.artifacts import SPLIT_CARD, read_json, write_text
from seqrec.commands import run
from seqrec.commands.benchmark import gains, ndcg_of_cases
from seqrec.config import Params, load
from seqrec.evaluation.metrics import FloatArray

CONFIG = Path(__file__).parent.parent / "configs/rec-denoiser/softmax.yaml"
ROWS = ("sasrec", "sasrec-both", "sasrec-ste")  # the first one is the base of the gains; --rows names others
SHARES = (0.05, 0.10, 0.15, 0.20, 0.25)
Values = dict[tuple[float, str], FloatArray]  # share, row -> NDCG@10 (S, C) of each draw and test case


def train(params: Params, share: float, seed: int, out: Path, rows: Sequence[str]) -> str:
    """Prepare a draw of the noise and train the rows on it; return the hash of its split."""
    params = params.with_overrides({"prepare.noise_share": share, "prepare.seed": seed, "seed": seed})
    prepared = run.prepare_data(params, out) / "sequences"
    for row in rows:
        run.train_model(params, row, prepared, out)
    return str(read_json(prepared / SPLIT_CARD)["split_sha256"])


def compare(params: Params, out: Path, shares: list[float], seeds: list[int], rows: Sequence[str] = ROWS) -> str:
    """Train what is missing; return the table.

    Raises:
        ValueError: the draws do not have the same test cases.
    """
    splits: dict[float, list[str]] = {share: [] for share in shares}
    reports: dict[tuple[float, str], list[Path]] = {cell: [] for cell in product(shares, rows)}
    for share, seed in product(shares, seeds):
        folder = out / f"noise-{share:.2f}/seed-{seed}"
        splits[share].append(train(params, share, seed, folder, rows))
        for row in rows:
            reports[share, row].append(folder / "reports" / row)
    user, flat = ndcg_of_cases([report for of_seeds in reports.values() for report in of_seeds])
    values = dict(zip(reports, flat.reshape(len(reports), len(seeds), -1), strict=True))
    hashes = "\n".join(f"- {share:.0%}: {', '.join(name[:12] for name in names)}" for share, names in splits.items())
    return f"{params.dataset}, seeds {', '.join(map(str, seeds))}\n\n{table(user, values)}\nSplits:\n\n{hashes}\n"


def table(user: NDArray[np.integer], values: Values) -> str:
    """Return one line for each share, and one for all draws, as Markdown, given the user of each case."""
    base, *others = dict.fromkeys(row for _, row in values)
    headings = ["noise", f"{base}: NDCG@10"]
    headings += [text for row in others for text in (f"{row}: NDCG@10", "gain [95 %], p (Holm)")]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    together = {
        (0.0, row): np.concatenate([part for cell, part in values.items() if cell[1] == row]) for row in (base, *others)
    }
    for group, name in ((values, "{:.0%}"), (together, "all")):
        differences = {cell: group[cell] - group[cell[0], base] for cell in group if cell[1] != base}
        found = dict(zip(differences, gains(user, [*differences.values()]), strict=True))
        for share in dict.fromkeys(share for share, _ in group):
            of_draws = group[share, base].mean(1)
            spread = f" ± {of_draws.std(ddof=1):.4f}" if len(of_draws) > 1 else ""
            cells = [name.format(share), f"{of_draws.mean():.4f}{spread}"]
            for row in others:
                gain, p_value = found[share, row]
                cells += [f"{group[share, row].mean():.4f}", f"{gain}, {p_value:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Train what is missing, write the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/rec-denoiser-noise"))
    parser.add_argument("--seeds", default="42,43,44,45,46", help="a draw each, separated by commas")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="shares, separated by commas")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="rows of the config, separated by commas, the base first"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("seqrec").setLevel(logging.INFO)
    shares, seeds = map(float, arguments.shares.split(",")), map(int, arguments.seeds.split(","))
    text = compare(load(CONFIG), arguments.out, list(shares), list(seeds), arguments.rows.split(","))
    write_text(arguments.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
