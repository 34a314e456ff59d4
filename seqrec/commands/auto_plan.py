"""What `seqrec auto` has decided and done; an interrupted run continues from it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqrec.artifacts import read_json, write_json


@dataclass
class Plan:
    """The decisions so far and the seconds spent, kept in a file."""

    path: Path
    request: dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)
    split: str = ""  # the protocol, and why
    done: list[str] = field(default_factory=list)  # completed steps: data, counts, models
    ease_items: int = 0  # largest catalogue with EASE
    baselines_s: float = 0.0  # for all baselines together
    spent: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path, request: dict[str, Any], free: Collection[str] = ()) -> Plan:
        """Return the plan at `path`, a new one if there is none; the entries `free` of its request may change.

        Raises:
            ValueError: the plan was made for another request.
        """
        if not path.is_file() or not ((kept := read_json(path))["done"] or kept["params"]):
            return cls(path, request)  # nothing was begun: other flags are welcome
        before = kept["request"]
        if other := [key for key, value in request.items() if key not in free and before.get(key) != value]:
            raise ValueError(
                f"--out: {path} belongs to other data or other flags ({', '.join(other)}): "
                "name another folder, or remove this folder"
            )
        return cls(path, **(kept | {"request": before | request}))

    def save(self, done: str = "") -> None:
        """Write the plan; `done` is complete from now on."""
        now = time.monotonic()
        self.spent, self.began = self.spent + now - self.began, now
        self.done += [done] if done else []
        names = ("request", "params", "split", "done", "ease_items", "baselines_s", "spent")
        write_json(self.path, {name: getattr(self, name) for name in names})

    def left(self) -> float:
        """Return the remaining seconds of the budget; may be negative."""
        return 60 * float(self.request["minutes"]) - self.spent - (time.monotonic() - self.began)

    def set_model(self, name: str, settings: dict[str, Any]) -> None:
        """Add a model to the settings."""
        self.params["models"][name] = settings
        self.params["leaderboard"] = list(self.params["models"])
        self.save()


def refuse_others(folder: Path, *plans: str) -> None:
    """Raise ValueError if `folder` holds files, but none of `plans`, those of earlier runs: a run replaces files."""
    if not any((folder / plan).is_file() for plan in plans):
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if others:
            raise ValueError(f"--out: {folder} holds other files, such as {others[0]}: name a new folder")
