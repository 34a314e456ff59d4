"""Comparison of evaluated runs: the paired gain on the same cases.

The interval and the sign-flip test say whether the gain would hold for other, similar users, with the given weights;
`seqrec benchmark` with several seeds says whether it would hold after another training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqrec.artifacts import CASES, METRICS, SPLIT_CARD, read_json, read_table
from seqrec.config.ranges import Fraction, Seed
from seqrec.data.sequences import Sequences, trained_until
from seqrec.data.sequences import cases as cases_of
from seqrec.data.sequences import load as load_sequences
from seqrec.evaluation import intervals, metrics, results
from seqrec.evaluation.metrics import FloatArray
from seqrec.pipeline import BASELINES

SPLITS = ("valid", "test")
AT = 10
WIDTH = 110  # columns that a table needs, however narrow the terminal
VALUES: dict[str, Callable[[FloatArray], FloatArray]] = {
    f"ndcg@{AT}": lambda rank: metrics.ndcg(rank, AT),
    f"recall@{AT}": lambda rank: (rank <= AT).astype(float),
}
SLICED = f"ndcg@{AT}"
FLIPS = 10_000  # random sign flips, where all flips are too many
EXACT_USERS = 16


@dataclass(frozen=True)
class Finished:
    """An evaluated run."""

    name: str
    metrics: Mapping[str, float]
    cases: pa.Table
    split: str | None  # hash of the prepared data, if it lies beside the report


def compare(
    runs: list[str],
    *,
    sequences: Path | None = None,
    confidence: Fraction = 0.95,
    seed: Seed = 42,
) -> dict[str, Any]:
    """Print and return the paired gain of the first run over each other run.

    Args:
        runs: reports/MODEL, or the output folder of `seqrec run`, followed by :MODEL if it holds several models.
        sequences: prepared data of the runs, for slices by target; checked against the runs.
        confidence: confidence level of the intervals.
        seed: seed of the resampling and of the random sign flips.

    Raises:
        FileNotFoundError: a run was not evaluated.
        ValueError: the runs differ in split or in how they were ranked.
    """
    if len(runs) < 2:
        raise ValueError("name at least two runs")
    finished = [_read(run) for run in runs]
    for other in finished[1:]:
        _check_same_evaluation(finished[0], other)
    prepared = None if sequences is None else _prepared(sequences, finished[0])
    result: dict[str, Any] = {
        "first": finished[0].name,
        "split_sha256": prepared.card["split_sha256"] if prepared else finished[0].split,
        "filter_seen": finished[0].metrics["filter_seen"],
        "confidence": confidence,
        "seed": seed,
        "others": {
            other.name: {
                split: _gains(finished[0], other, split, prepared, confidence=confidence, seed=seed) for split in SPLITS
            }
            for other in finished[1:]
        },
    }
    console = Console(width=max(Console().width, WIDTH))
    for name, gains in result["others"].items():
        console.print(_gain_table(result, name, gains))
    return result


def sign_flip_p_value(total_U: FloatArray, *, seed: int) -> float:
    """Return the two-sided p-value of sum(total_U) under random signs: the sign-flip test.

    For up to `EXACT_USERS` users with a difference, all flips are enumerated. For more, `FLIPS` random flips are drawn,
    and the observed signs are counted as one more, so that no p-value is 0 (Phipson and Smyth 2010). The signs of m
    users with the same absolute difference sum to 2 Binomial(m, 1/2) - m, so one number is drawn for all of them.
    """
    moved = total_U[total_U != 0]
    # rounding must not decide: sums of the same terms in another order count as equal
    enough = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()
    if len(moved) <= EXACT_USERS:
        signs = 2 * (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1) - 1
        return float((np.abs(signs @ moved) >= enough).mean())
    size, users = np.unique(np.abs(moved), return_counts=True)
    generator = np.random.default_rng(seed)
    step = max(1, 4_000_000 // len(size))  # bounds the memory of one draw
    extreme = 0
    for start in range(0, FLIPS, step):
        heads = generator.binomial(users, 0.5, size=(min(step, FLIPS - start), len(size)))
        extreme += int((np.abs((2 * heads - users) @ size) >= enough).sum())
    return (extreme + 1) / (FLIPS + 1)


def _read(run: str) -> Finished:
    report = _report(run)
    for file in (METRICS, CASES):
        if not (report / file).is_file():
            raise FileNotFoundError(f"{report / file} not found: evaluate {run} first")
    split = report.parent.parent / "data" / "sequences" / SPLIT_CARD
    return Finished(
        name=run,
        metrics=read_json(report / METRICS),
        cases=read_table(report / CASES),
        split=read_json(split)["split_sha256"] if split.is_file() else None,
    )


def _report(run: str) -> Path:
    """Return the report folder of `run`."""
    if (Path(run) / METRICS).is_file():
        return Path(run)
    folder, _, model = (run, "", "") if Path(run).is_dir() else run.rpartition(":")
    reports = Path(folder or run) / "reports"
    if not reports.is_dir():
        raise FileNotFoundError(
            f"{run} holds no {METRICS} and is not the output of `seqrec run`: evaluate the model first"
        )
    found = sorted(path.parent.name for path in reports.glob(f"*/{METRICS}"))
    if model in found:
        return reports / model
    if model:
        others = f", but {', '.join(found)}" if found else ""
        raise FileNotFoundError(f"{folder} holds no evaluated model {model}{others}")
    trained = [name for name in found if name not in BASELINES] or found
    if len(trained) != 1:
        raise ValueError(f"{run} holds the models {', '.join(found) or '(none)'}: name one, as in {run}:MODEL")
    return reports / trained[0]


def _check_same_evaluation(first: Finished, other: Finished) -> None:
    if first.name == other.name:
        raise ValueError(f"{first.name} is named twice")
    if None not in (first.split, other.split) and first.split != other.split:
        raise ValueError(
            f"{first.name} and {other.name} were evaluated on different splits, {first.split:.12} and "
            f"{other.split:.12}: compare runs of one split only"
        )
    if first.metrics["filter_seen"] != other.metrics["filter_seen"]:
        raise ValueError(f"{first.name} and {other.name} differ in filter_seen: evaluate both with the same value")
    if first.metrics.get("refit", 0) != other.metrics.get("refit", 0):
        raise ValueError(f"{first.name} and {other.name} differ in evaluate.refit: train both with the same value")
    for split in SPLITS:
        try:
            intervals.aligned(first.cases, other.cases, split)
        except ValueError as error:
            raise ValueError(f"{first.name} and {other.name}, {split}: {error}") from error


def _prepared(folder: Path, run: Finished) -> Sequences:
    """Return the prepared data in `folder`; raise ValueError if `run` was evaluated on other data."""
    prepared = load_sequences(folder)
    for split in SPLITS:
        chosen = cases_of(prepared, split)
        unranked = torch.zeros(len(chosen))
        try:
            intervals.aligned(run.cases, results.case_table(split, prepared, chosen, unranked, unranked), split)
        except ValueError as error:
            raise ValueError(f"--sequences: {folder} is not the split that {run.name} was evaluated on") from error
    return prepared


def _gains(
    first: Finished, other: Finished, split: str, prepared: Sequences | None, *, confidence: float, seed: int
) -> dict[str, Any]:
    ours, theirs = intervals.aligned(first.cases, other.cases, split)
    everything = np.ones(len(ours["user"]), dtype=bool)

    def gain(name: str, mask: NDArray[np.bool_]) -> dict[str, float]:
        value, base = (VALUES[name](columns["rank"][mask]) for columns in (ours, theirs))
        interval = intervals.bootstrap(
            value - base,
            ours["user"][mask],
            confidence=confidence,
            resamples=intervals.RESAMPLES,
            seed=seed,
            difference=True,
        )
        figures = {"first": _mean(value), "other": _mean(base), "gain": interval.mean}
        return figures | {"low": interval.low, "high": interval.high}

    result: dict[str, Any] = {"cases": len(everything), "users": len(np.unique(ours["user"]))}
    for name, value in VALUES.items():
        total_U = _total_by_user(value(ours["rank"]) - value(theirs["rank"]), ours["user"])
        counts = {"users_better": total_U > 0, "users_equal": total_U == 0, "users_worse": total_U < 0}
        result[name] = gain(name, everything) | {key: int(found.sum()) for key, found in counts.items()}
        result[name]["p_value"] = sign_flip_p_value(total_U, seed=seed)
    if prepared is not None and split == "test" and first.metrics.get("refit"):
        prepared = trained_until(prepared, prepared.valid_stop)
    masks = results.length_slices(torch.from_numpy(ours["position"]))
    if prepared is not None:
        masks |= results.target_slices(prepared, cases_of(prepared, split))
    slices = {name: mask.numpy() for name, mask in masks.items()}
    result["slices"] = {name: {"cases": int(mask.sum())} | gain(SLICED, mask) for name, mask in slices.items()}
    return result


def _mean(value: FloatArray) -> float:
    return float(value.mean()) if len(value) else 0.0


def _total_by_user(difference: FloatArray, user: NDArray[np.integer]) -> FloatArray:
    """Return the summed difference of each user, with rounding errors around 0 set to 0."""
    _, index = np.unique(user, return_inverse=True)
    total_U = np.bincount(index, weights=difference)
    return np.where(np.abs(total_U) < 1e-12, 0.0, total_U)


def _gain_table(result: Mapping[str, Any], other: str, gains: Mapping[str, Any]) -> Table:
    split = result["split_sha256"]
    table = Table(
        title=f"{result['first']} against {other}",
        caption=(
            f"{gains['test']['users']} users{f', split {split:.12}' if split else ''}; intervals"
            " and p-values are over users, for these weights; other seeds would give other weights"
        ),
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    headings = ("", "first", "other", f"gain [{result['confidence']:.0%} interval]", "p", "users +/=/-")
    for heading in headings:
        table.add_column(escape(heading), justify="right" if heading else "left", no_wrap=True)
    for part in SPLITS:
        for name in VALUES:
            table.add_row(f"{part} {name}", *_cells(gains[part][name]))
            for part_of, figures in gains[part]["slices"].items() if name == SLICED else ():
                table.add_row(f"  {part_of} ({figures['cases']})", *_cells(figures), style="dim")
    return table


def _cells(figures: Mapping[str, float]) -> list[str]:
    gain, low, high = (f"{figures[name]:+.4f}".replace("0.", ".", 1) for name in ("gain", "low", "high"))
    cells = [f"{figures['first']:.4f}", f"{figures['other']:.4f}", escape(f"{gain} [{low}, {high}]")]
    if "p_value" in figures:
        cells.append(f"{figures['p_value']:.4f}")
        cells.append("/".join(str(figures[f"users_{name}"]) for name in ("better", "equal", "worse")))
    return cells
