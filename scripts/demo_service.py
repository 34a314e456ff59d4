"""A champion of films that do not exist, trained in seconds and served: what screenshots.py takes pictures of."""

from __future__ import annotations

import csv
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import yaml

GENRES = {
    "Mystery": ("The Missing Organist of", "A Ledger from", "Nine Lamps in", "The Quiet Jury of", "Fog over"),
    "Science fiction": ("Signal from", "The Last Ferry to", "Glass Orbit:", "Seeds for", "Low Gravity in"),
    "Comedy": ("A Goat for the Mayor of", "Three Umbrellas in", "My Aunt Bought", "Half a Wedding in", "Nobody Told"),
    "Romance": ("Letters to", "Late Roses in", "The Violin Shop of", "Two Tickets to", "Dancing near"),
    "Adventure": ("The Salt Road to", "Kites above", "The Cartographer of", "Beyond the Gates of", "River Pilots of"),
    "Documentary": ("Bakers of", "How They Built", "A Year of Weather in", "The Bees of", "Night Shift in"),
}
PLACES = ("Orvane", "Marrowick", "Quillon Bay", "Tessaly Moor", "Brindlehaven")
USERS, LONGEST = 500, 24
FIRST_SECOND = 1_700_000_000
CANDIDATE = "flash4rec"
SETTINGS = {
    "dataset": "invented",
    "leaderboard": ["sasrec", CANDIDATE],
    "finetune": {"epochs": 25, "batch_size": 64, "warmup_steps": 20, "patience": 25},
    "evaluate": {"bootstrap": 100},
    "models": {
        "sasrec": {"options": {"d_model": 32, "layers": 1, "heads": 2, "length": LONGEST}},
        CANDIDATE: {"options": {"d_model": 32, "d_shared": 16, "d_value": 32, "d_expert": 32, "length": LONGEST}},
    },
}


def films() -> list[tuple[str, str, str, int]]:
    """Return id, title, genre and year of every film; those with the same words are a series."""
    found = []
    for genre, words in GENRES.items():
        for series, beginning in enumerate(words):
            for part, place in enumerate(PLACES):
                found.append((f"f{len(found) + 1}", f"{beginning} {place}", genre, 1990 + 4 * series + 3 * part))
    return found


def histories(number_of_films: int) -> Iterator[tuple[str, int]]:
    """Yield user and number of a film: mostly the next one of a series, else another one of two favourite genres."""
    draw = random.Random(0)
    in_genre = number_of_films // len(GENRES)
    for user in range(USERS):
        favourites = draw.sample(range(len(GENRES)), 2)
        seen: set[int] = set()
        film = -1
        for _ in range(draw.randint(8, LONGEST)):
            goes_on = film >= 0 and (film + 1) % len(PLACES) and draw.random() < 0.7
            film = film + 1 if goes_on else draw.choice(favourites) * in_genre + draw.randrange(in_genre)
            if film not in seen:
                seen.add(film)
                yield f"u{user}", film


def write_tables(folder: Path) -> None:
    """Write events.csv and items.csv."""
    rows = films()
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("item_id", "title", "genre", "year"), *rows])
    events = [
        (user, rows[film][0], FIRST_SECOND + 3600 * hour) for hour, (user, film) in enumerate(histories(len(rows)))
    ]
    with (folder / "events.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("user_id", "item_id", "timestamp"), *events])


def train(folder: Path) -> Path:
    """Train two models, register the better one as the champion; return the settings."""
    write_tables(folder)
    tables = {"source": "csv", "interactions": str(folder / "events.csv"), "items": str(folder / "items.csv")}
    registry = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "allow_below_baseline": True}
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({**SETTINGS, "ingest": tables, "register": registry}), encoding="utf-8")
    for arguments in (["run", "--config-file", str(settings), "--out", "out"], ["import", "--run", "out"]):
        subprocess.run([sys.executable, "-m", "seqrec", *arguments], cwd=folder, check=True)
    return folder / "out" / "params.yaml"


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve the champion beside a candidate on a free port of this machine alone; give its address and process."""
    settings = train(folder)
    shutil.copytree(folder / "out" / "artifacts" / CANDIDATE / "finetuned", folder / "next")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "seqrec", "serve", "--params", str(settings), "--port", str(port)]
    command += ["--items", "out/data/items.parquet", "--candidate", "next"]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
