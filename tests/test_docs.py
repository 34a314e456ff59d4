"""What the pages promise: every figure can be traced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_sources.py"
SPECIFICATION = importlib.util.spec_from_file_location("check_sources", SCRIPT)
check_sources = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(check_sources)


@pytest.mark.parametrize("page", check_sources.pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_has_a_source(page):
    assert check_sources.problems(page, check_sources.history()) == []
