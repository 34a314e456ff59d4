"""The experiments of scripts/experiments.py name scripts, configs, datasets and rows that exist."""

from __future__ import annotations

import argparse

import pytest
from support import ROOT

from scripts.experiments import EXPERIMENTS
from seqrec.config import load


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_an_experiment_names_exists(name):
    parser = argparse.ArgumentParser()
    for flag in ("--config-file", "--dataset", "--only", "--base"):
        parser.add_argument(flag, default="")
    given, words = parser.parse_known_args(EXPERIMENTS[name])
    assert words[0] == "-m" or (ROOT / words[0]).is_file()
    if given.config_file:
        params = load(ROOT / given.config_file)
        params.dataset_entry(given.dataset or params.dataset)
        assert set(filter(None, [*given.only.split(","), given.base])) <= set(params.leaderboard)
