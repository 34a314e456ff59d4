"""Draw what a command leaves on a terminal.

    python scripts/terminal.py --last 54 --output docs/images/repro.svg make repro

The command runs in a pseudo-terminal, so that it shows its progress bars and colours; what it has erased at the end is
not drawn.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROWS, COLUMNS = 50, 100  # of the terminal
PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b.|\r|\n|[^\x1b\r\n]+")


def main() -> int:
    """Run the command, write the drawing, and return the command's status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the .svg file to write")
    parser.add_argument("--last", type=int, default=0, help="how many lines to draw, from the end; 0: all of them")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    flags = parser.parse_args()
    text, status = run(flags.command)
    draw(screen(text)[-flags.last :], " ".join(flags.command), flags.output)
    return status


def run(command: list[str]) -> tuple[str, int]:
    """Return all that `command` wrote to its terminal, and its exit status; it is shown here as well."""
    place, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(place, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        if not piece:
            break
        written += piece
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    return written.decode(errors="replace"), process.wait()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end, with their colours as escape sequences."""
    lines, row, restart = [""], 0, False
    for match in PIECE.finditer(written):
        piece, (count, letter) = match[0], match.groups()
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            restart = True  # what comes next replaces the line
        elif letter == "A":
            row = max(0, row - int(count or 1))
        elif letter == "B":
            row += int(count or 1)
            lines += [""] * (row + 1 - len(lines))
        elif letter == "K":
            lines[row] = "" if count == "2" or restart else lines[row]
        elif letter == "m" or letter is None:
            lines[row] = piece if restart else lines[row] + piece
            restart = False
    while lines and not Text.from_ansi(lines[-1]).plain.strip():
        lines.pop()
    return lines


def draw(lines: list[str], title: str, output: Path) -> None:
    """Write `lines` as a drawing of a terminal."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(console.export_svg(title=title), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
