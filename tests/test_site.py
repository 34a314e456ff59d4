"""The site builds without a warning, and the pages written from the code are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_reference_says_what_the_code_says():
    for path, text in load("reference").pages().items():
        assert path.read_text() == text, f"{path.name}: run python scripts/reference.py"


def test_every_setting_has_a_meaning():
    reference = load("reference")

    silent = {
        f"{key}.{field.name}"
        for key, section, _ in reference.PARTS
        for field in reference.dataclasses.fields(section)
        if not reference.meanings(section).get(field.name)
    }

    assert silent == set()
    assert reference.meanings(reference.config.PretrainConfig)["held_out"].startswith("text models")


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # raises where a link leads nowhere

    first = (tmp_path / "index.html").read_text()
    assert 'href="reference/settings.html"' in first
    assert 'href="repository/params.yaml.html"' in first
    assert (tmp_path / "repository" / "params.yaml.html").is_file()


def test_a_link_that_leads_nowhere_is_a_warning(caplog):
    hooks = load("site_hooks")

    text, linked = hooks.rewritten("[a](../params.yaml) [b](none.yaml)", "docs/data.md", "data.md")

    assert text.startswith("[a](repository/params.yaml.md) [b](none.yaml)")
    assert linked == ["params.yaml"]
    assert "docs/data.md: the link to none.yaml leads nowhere" in caplog.text


def test_every_link_leads_to_a_file(caplog):
    hooks = load("site_hooks")

    for path in [*hooks.PAGES, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]:
        hooks.page(path)

    assert not caplog.messages
