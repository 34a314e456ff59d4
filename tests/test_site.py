"""The site builds without a warning, every setting has a meaning, and every figure can be traced."""

from __future__ import annotations

import pytest
from support import ROOT

from scripts import check_sources, reference, site_hooks


def test_every_figure_of_a_page_has_a_source():
    pages, commits = check_sources.pages(), check_sources.history()

    assert [problem for page in pages for problem in check_sources.problems(page, commits)] == []


def test_every_setting_has_a_meaning():
    silent = {
        f"{key}.{field.name}"
        for key, section, _ in reference.PARTS
        for texts in [reference.meanings(section)]
        for field in reference.dataclasses.fields(section)
        if not texts.get(field.name)
    }

    assert silent == set()
    assert reference.meanings(reference.config.PretrainConfig)["held_out"].startswith("unisrec")
    assert "| `loss` | `ce`, `sampled_ce`, `bce`, `gbce`, `bpr` | `'ce'` | or auto |" in reference.settings()
    assert "SUPPRESS" not in reference.commands()  # the default of a flag that has none of its own


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
    assert 'src="iframe-worker.js"' in first  # search works from a folder, without a network
    assert (tmp_path / "iframe-worker.js").is_file()
    assert 'src="../iframe-worker.js"' in (tmp_path / "reference" / "settings.html").read_text()
    assert "<code>user_share</code>" in (tmp_path / "reference" / "settings.html").read_text()
    assert "<code>--config-file</code>" in (tmp_path / "reference" / "commands.html").read_text()
    assert (tmp_path / "repository" / "params.yaml.html").is_file()


def test_every_link_leads_to_a_file(caplog):
    for path in [*site_hooks.PAGES, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]:
        site_hooks.page(path)

    assert not caplog.messages
