"""The options of `seqrec serve`, and its file of keys."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.files import damaged
from fuzz.harness import Target
from fuzz.setting_targets import NASTY, ROOT
from seqrec.__main__ import bind, command_parser
from seqrec.commands.keys import keys as keys_command
from seqrec.serving import keys

PARSER = command_parser("serve")
FLAGS = sorted(set(vars(PARSER.parse_args([]))) - {"params", "metrics", "verbose"})
WORDS = [
    *("", " ", "x", "\x00", "nan", "inf", "-inf", "-1", "0", "-0.0", "0.5", "1", "1e3", "1e-320", "1e400", "1_000"),
    *(
        "9" * 30,
        "9" * 5000,
        "0x10",
        "٣",
        "text",
        "json",
        "::1",
        "sqlite://",
        "models:/x/1",
        "a,b",
        "\udcff",
        "z" * 9999,
    ),
]


def options() -> st.SearchStrategy[list[str]]:
    """Return arguments of `serve`: up to three flags with odd values."""
    flag = st.builds(
        lambda name, value: f"--{name.replace('_', '-')}={value}",
        st.sampled_from(FLAGS),
        st.sampled_from(WORDS) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=5),
    )
    return st.lists(flag, max_size=3)


def parse(arguments: list[str]) -> None:
    """Read the arguments as the command does; what is accepted must be numbers that can be used."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            flags = PARSER.parse_args([*arguments, "--params", str(ROOT / "configs" / "first.yaml")])
    except SystemExit as error:
        raise ValueError(said.getvalue()) from error
    accepted = vars(bind("serve", flags)["options"])
    for name, value in accepted.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), name
            assert value >= 0, name


SECRET = "secret"
KEYS = {
    "keys": [
        {"name": "shop", "sha256": keys._digest(SECRET), "admin": False, "expires": None},
        {"name": "boss", "sha256": "0" * 64, "admin": True, "expires": 4e9},
    ]
}


@st.composite
def key_files(draw: st.DrawFn) -> bytes:
    """Return a file of keys, with up to three values changed, removed or added, or with damaged bytes."""
    content: Any = copy.deepcopy(KEYS)
    value = st.sampled_from([*NASTY, 253_402_300_799, 1e300, "0" * 64, "é" * 64])
    for _ in range(draw(st.integers(0, 3))):
        entry = draw(st.sampled_from(content["keys"]))
        name = draw(st.sampled_from([*sorted(entry), "unheard of"]))
        if draw(st.booleans()):
            entry[name] = copy.deepcopy(draw(value))
        else:
            entry.pop(name, None)
    if draw(st.integers(0, 4)) == 0:
        content["keys"][draw(st.integers(0, 1))] = copy.deepcopy(draw(value))
    if draw(st.integers(0, 9)) == 0:
        content = draw(st.sampled_from([*NASTY, {"keys": {}}, {"keys": None}, {"keys": []}]))
    text = json.dumps(content, skipkeys=True).encode()
    return draw(damaged(text)) if draw(st.integers(0, 2)) == 0 else text


def use(data: bytes) -> None:
    """Look a key up, show all, and add one, which must then be found."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder, "keys.json")
        path.write_bytes(data)
        opened = keys.Keys(path)
        opened.find(SECRET)
        opened.find("é\udcff")
        keys_command(["show"], keys_file=path)
        added = keys.add(path, "new", days=1)
        assert opened.find(added) is not None
        keys.rotate(path, "new")
        keys.expire(path, "new")
        assert opened.find(added) is None


SERVICE = [Target("serve-options", options(), parse), Target("serve-keys", key_files(), use)]
