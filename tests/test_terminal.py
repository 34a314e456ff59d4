"""What scripts/terminal.py makes of what a command writes to its terminal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "terminal.py"
SPECIFICATION = importlib.util.spec_from_file_location("terminal", SCRIPT)
terminal = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(terminal)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("10 %\r100 %\r\ndone\r\n", ["100 %", "done"]),
        ("bar\r\x1b[2Kabove the bar\r\nbar\r\x1b[2K", ["above the bar"]),
        ("bar\r\n    \x1b[1A\rone\r\ntwo", ["one", "two"]),
        ("a\r\nb\r\n\x1b[1A\x1b[2Kc\r\n", ["a", "c"]),
        ("\x1b[?25l\x1b[31mred\x1b[0m\r\n\x1b[?25h", ["\x1b[31mred\x1b[0m"]),
    ],
)
def test_the_screen_is_what_is_left_in_the_end(written, shown):
    assert terminal.screen(written) == shown


def test_a_command_runs_in_a_terminal(tmp_path, capfdbinary):
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns); sys.exit(3)"
    written, status = terminal.run([sys.executable, "-c", code])
    terminal.draw(terminal.screen(written), "<title>", tmp_path / "new" / "one.svg")

    assert (written, status) == ("True 100\r\n", 3)
    assert "&lt;title&gt;" in (tmp_path / "new" / "one.svg").read_text()
