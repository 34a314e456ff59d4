"""Runs the experiments behind the pages of results; an interrupted one continues where it stopped.

python scripts/experiments.py --only strec-oracle,flash4rec-parts
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCHMARK = ("-m", "seqrec", "benchmark", "--config-file")
PARTS = (*BENCHMARK, "configs/flash4rec/parts.yaml", "--base", "flash4rec")
USER_ROWS = "flash4rec,no-user-gate,plain,sasrec"
PAPER = (*BENCHMARK, "configs/flash4rec/paper.yaml", "--base", "flash4rec")
NOISE = ("scripts/rec_denoiser_noise.py",)
MASKS = ("--shares", "0.15,0.2", "--rows", "sasrec,sasrec-dropout,sasrec-ste-mask,sasrec-ste")
SOFTMAX = ("scripts/rec_denoiser_twins.py", "--config-file", "configs/rec-denoiser/softmax.yaml")
BACKBONES = ",".join(f"{name},{name}-both" for name in ("sasrec", "tisasrec", "ssept"))
REQUEST_TIME = (*BENCHMARK, "configs/flash4rec/request-time.yaml", "--base", "flash4rec")
EXPERIMENTS: dict[str, tuple[str, ...]] = {  # name -> arguments of Python; each also gets --seeds and --out
    "flash4rec-parts": PARTS,
    "flash4rec-parts-ml-100k": (*PARTS, "--dataset", "ml-100k"),
    "flash4rec-parts-beauty": (*PARTS, "--dataset", "beauty-5000-users", "--only", USER_ROWS),
    "flash4rec-routing": ("scripts/flash4rec_routing.py",),
    "flash4rec-paper": (*PAPER, "--only", "flash4rec,bert4rec"),
    "request-time": REQUEST_TIME,
    "request-time-beauty": (*REQUEST_TIME, "--dataset", "beauty-5000-users"),
    "request-time-ml-100k": (*REQUEST_TIME, "--dataset", "ml-100k"),
    "rec-denoiser-twins": ("scripts/rec_denoiser_twins.py",),
    "rec-denoiser-default": (*BENCHMARK, "params.yaml", "--base", "sasrec", "--only", "sasrec,rec_denoiser"),
    "rec-denoiser-softmax": SOFTMAX,
    "rec-denoiser-softmax-ml-1m": (*SOFTMAX, "--dataset", "ml-1m-2000-users", "--only", BACKBONES),
    "rec-denoiser-noise": NOISE,
    "rec-denoiser-noise-masks": (*NOISE, *MASKS),
    "strec": (*BENCHMARK, "configs/strec/ml-100k.yaml", "--base", "backbone"),
    "strec-beauty": (*BENCHMARK, "configs/strec/beauty.yaml", "--base", "backbone"),
    "strec-ml-1m": (*BENCHMARK, "configs/strec/ml-1m.yaml", "--base", "backbone", "--dataset", "ml-1m-2000-users"),
    "strec-efficiency": ("-m", "benchmarks.strec_efficiency"),
    "strec-oracle": ("scripts/strec_oracle.py",),
    # they take days without a GPU, and Yelp's files have to be fetched by hand
    "flash4rec-paper-ml-20m": (*PAPER, "--dataset", "ml-20m"),
    "flash4rec-paper-yelp": (*PAPER, "--dataset", "yelp"),
}


def main() -> int:
    """Run the chosen experiments one after the other, and return the status of the first that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"names, separated by commas; default: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--seeds", default="42,43,44", help="seeds, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder that receives the tables")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(EXPERIMENTS)
    if unknown := set(names) - set(EXPERIMENTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(EXPERIMENTS)}")
    if not all(seed.strip().isdecimal() for seed in arguments.seeds.split(",")):
        parser.error(f"--seeds: {arguments.seeds!r} is not a list of numbers such as 42,43,44")
    for name in names:
        flags = ["--seeds", arguments.seeds, "--out", str(arguments.out.resolve() / name)]
        if status := subprocess.call([sys.executable, *EXPERIMENTS[name], *flags], cwd=ROOT):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
