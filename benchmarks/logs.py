"""A synthetic log with the shape of real ones, of any length: `python -m benchmarks.logs --rows 20000000 --output F`.

Few users and items have most of the events (Zipf), items come up and fade, events are in order of time, and one in a
hundred repeats another. Written block by block: memory does not grow with the rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl

from seqrec.artifacts import written

BLOCK = 2_000_000
FIRST, LAST = 1_400_000_000, 1_700_000_000  # times, seconds UTC
ROWS_PER_USER, ROWS_PER_ITEM = 145, 200  # about those of MovieLens-20M and of Amazon's large categories
EPOCHS = 10  # in each, another half of the catalogue is popular
REPEATED = 0.01


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Write a CSV with the columns user_id, item_id, rating and timestamp."""
    generator = np.random.default_rng(seed)
    users, items = max(2, rows // ROWS_PER_USER), max(2, rows // ROWS_PER_ITEM)
    user_share, item_share = _cumulative(users, 0.6), _cumulative(items, 0.9)
    first_half = generator.random((EPOCHS, items)) < 0.5
    with written(path) as partial, partial.open("wb") as file:
        file.write(b"user_id,item_id,rating,timestamp\n")
        for start in range(0, rows, BLOCK):
            number = min(BLOCK, rows - start)
            low, high = (FIRST + (LAST - FIRST) * place // rows for place in (start, start + number))
            user = np.searchsorted(user_share, generator.random(number))
            item = np.searchsorted(item_share, generator.random(number))
            popular = first_half[EPOCHS * start // rows]
            item = np.where(popular[item], item, np.searchsorted(item_share, generator.random(number)))
            columns = {"user": user, "item": item, "time": np.sort(generator.integers(low, high, size=number))}
            repeated = generator.integers(1, number, size=int(number * REPEATED))
            for values in columns.values():
                values[repeated] = values[repeated - 1]
            rating = generator.integers(1, 11, size=number) / 2
            _block(**columns, rating=rating, users=users, items=items).write_csv(file, include_header=False)


def _cumulative(number: int, exponent: float) -> np.ndarray:
    weight = (np.arange(number) + 10.0) ** -exponent
    return np.cumsum(weight / weight.sum())[:-1]


def _block(
    user: np.ndarray, item: np.ndarray, time: np.ndarray, rating: np.ndarray, users: int, items: int
) -> pl.DataFrame:
    """Name users and items as shops do; the numbers are scattered, so that a popular item has no small one."""
    frame = pl.DataFrame({"user": user * 7_919 % users, "item": item * 7_919 % items, "rating": rating, "time": time})
    return frame.select(
        pl.format("A{}", pl.col("user").cast(pl.String).str.zfill(10)),
        pl.format("B{}", pl.col("item").cast(pl.String).str.zfill(9)).alias("item_id"),
        "rating",
        "time",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.output, arguments.rows, arguments.seed)
