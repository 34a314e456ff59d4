"""Check that every figure of the result pages and the README can be traced.

  python scripts/check_sources.py

A section that states a figure, such as 0.1234, needs a line that starts with `Source:` in itself or in a section above
it. That line names what was run (a config, `params.yaml` or a command), the commit, and the hash of the split or
`no dataset`. Files and commits must exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURE = re.compile(r"(?<![\w.])[0-9]?\.[0-9]{3,}\b|\b[0-9]+(?:\.[0-9]+)? (?:ms|s|minutes)\b")
COMMIT = re.compile(r"`([0-9a-f]{7})`")
SPLIT = re.compile(r"`[0-9a-f]{12}`|no dataset")
COMMAND = re.compile(r"`(?:[A-Z_]+=\S+ )?(?:python|make|OMP)[^`]*`|\.yaml")
CONFIG = re.compile(r"\]\(([^)#]+\.yaml)\)|`(configs/[^`]+?\.yaml)`")


def sections(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield level, title and lines of each section; code blocks and comments are left out."""
    level, title, lines = 0, "", []
    for line in re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL).splitlines():
        if heading := re.match(r"(#+) (.*)", line):
            yield level, title, lines
            level, title, lines = len(heading[1]), heading[2], []
        else:
            lines.append(line)
    yield level, title, lines


def problems(page: Path, commits: set[str] | None) -> list[str]:
    """Return what cannot be traced on `page`; `commits` are the known ones, None where there is no history."""
    found, above = [], []  # the levels of open sections, and whether each has a source
    for level, title, lines in sections(page.read_text(encoding="utf-8")):
        above = [(upper, sourced) for upper, sourced in above if upper < level]
        sources = re.findall(r"^Source:.*(?:\n.+)*", "\n".join(lines), re.MULTILINE)
        above.append((level, bool(sources)))
        if any(FIGURE.search(line) for line in lines) and not any(sourced for _, sourced in above):
            found.append(f"{page.name}: {title or 'the beginning'}: figures without a `Source:` line")
        for source in sources:
            found += [f"{page.name}: {title}: {problem}" for problem in _source_problems(page, source, commits)]
    return found


def _source_problems(page: Path, source: str, commits: set[str] | None) -> Iterator[str]:
    for wanted, pattern in (("command or config", COMMAND), ("commit", COMMIT), ("split, nor `no dataset`,", SPLIT)):
        if not pattern.search(source):
            yield f"no {wanted} in `{source.splitlines()[0][:80]}`"
    for link, path in CONFIG.findall(source):
        if not (page.parent / link if link else ROOT / path).is_file():
            yield f"{link or path} does not exist"
    for commit in COMMIT.findall(source):
        if commits is not None and commit not in commits:
            yield f"{commit} is no commit of this repository"


def history() -> set[str] | None:
    """Return the first seven characters of every commit; None without a complete history."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        return None
    log = subprocess.run([*git, "log", "--all", "--format=%H"], capture_output=True, text=True, check=True)
    return {line[:7] for line in log.stdout.split()}


def pages() -> list[Path]:
    """Return the pages that state results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]


if __name__ == "__main__":
    commits = history()
    wrong = [problem for page in pages() for problem in problems(page, commits)]
    sys.stdout.write("\n".join([*wrong, f"{len(pages())} pages, {len(wrong)} problems"]) + "\n")
    sys.exit(bool(wrong))
