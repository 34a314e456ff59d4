"""What the pages promise: every figure can be traced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_sources.py"
SPECIFICATION = importlib.util.spec_from_file_location("check_sources", SCRIPT)
check_sources = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(check_sources)

SOURCE = "Source: `python -m seqrec run` · commit `abcdef0` · split `0123456789ab`"


@pytest.mark.parametrize("page", check_sources.pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_has_a_source(page):
    assert check_sources.problems(page, check_sources.history()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"# A\n\n{SOURCE}\n\n## B\n\n| 0.1234 |\n", None),
        ("# A\n\nNo figure here, in 2 layers.\n", None),
        ("# A\n\n| 0.1234 |\n", "figures without"),
        (f"# A\n\n## B\n\n{SOURCE}\n\n## C\n\nIt took 12.5 s.\n", "C: figures without"),
        (f"# A\n\n{SOURCE.replace('abcdef0', '1234567')}\n\n0.1234\n", "is no commit"),
        ("# A\n\nSource: `make repro` · commit `abcdef0`\n\n0.1234\n", "no split"),
        (f"# A\n\n{SOURCE}, [x](configs/none.yaml)\n\n0.1234\n", "configs/none.yaml does not exist"),
    ],
)
def test_what_cannot_be_traced_is_named(tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(text)

    found = check_sources.problems(page, {"abcdef0"})

    assert (problem in found[0]) if problem else not found
