"""params.yaml, and the config files of `seqrec run`."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz.harness import Target
from seqrec import config
from seqrec.config import load

ROOT = Path(__file__).parents[2]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
SMALL = {
    "dataset": "ml-100k",
    "models": {"sasrec": {"options": {"d_model": 16}}},
    "finetune": {"epochs": 1, "learning_rate": 0.001},
    "datasets": {"ml-100k": {"prepare": {"min_rating": 1.0}, "options": {"length": 20}}},
}
NASTY = [
    *(None, "", "x", "ml-1m", "1e-3", "\x00", "z" * 10_000, True, False),
    *(0, -1, 0.5, 10**30, -(10**30), float("nan"), float("inf"), 1e-320),
    *([], {}, [None], {"": None}, {None: 1}, {1: 2}, [[[]]], {"a": {"b": {}}}),
]
TEXTS = [
    "\t",
    ": ",
    "- ",
    "{",
    "[",
    "&a ",
    "*a",
    "!!python/object:x ",
    "%",
    "|",
    "\x00",
    "'",
    '"',
    "? ",
    "<<: ",
    "---\n",
]


def paths(content: Any, before: tuple = ()) -> list[tuple]:
    """Return the path of everything in a nested dict."""
    found = [before] if before else []
    if isinstance(content, dict):
        for key, value in content.items():
            found += paths(value, (*before, key))
    return found


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any]) -> str:
    """Return a config as YAML, with up to three values changed, removed or added, or with an edit of the text."""
    content = copy.deepcopy(good)
    for _ in range(draw(st.integers(0, 3))):
        known = paths(content)
        if not known:
            break
        *above, key = draw(st.sampled_from(known))
        inner = content
        for name in above:
            inner = inner[name]
        action = draw(st.sampled_from(["set", "set", "set", "remove", "add"]))
        if action == "remove":
            del inner[key]
        else:
            inner[key if action == "set" else "unheard_of"] = copy.deepcopy(draw(st.sampled_from(NASTY)))
    text = yaml.safe_dump(content)
    if draw(st.integers(0, 3)) == 0:
        at = len(text) * draw(st.integers(0, 1000)) // 1000
        text = text[:at] + draw(st.sampled_from(TEXTS) | st.text(max_size=5)) + text[at:]
    return text


def _read(load: Any, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        params = load(path)
        for section in config.SECTIONS:
            params.section(section)


SETTINGS = [
    Target("params", changed(PARAMS), lambda text: _read(config.load, text)),
    Target("run-config-file", changed(SMALL), lambda text: _read(load, text)),
]
