"""The choice of values on validation, and that a half of the users never chooses for itself."""

from dataclasses import dataclass

import pytest
import torch

from seqrec.config import CountsConfig
from seqrec.counts import search
from seqrec.counts.search import Tables
from seqrec.counts.term import nothing
from seqrec.data import sequences


@dataclass(frozen=True)
class Level:
    """How high users of even and of odd index score their own target."""

    even: float = 0.0
    odd: float = 0.0
    both: float = 0.0


def leveled(values):
    """A scorer that knows the targets: even users gain from `even`, odd ones from `odd`, all of them from `both`."""

    def scorer(data, user, stop):
        level = torch.where(user % 2 == 0, values.even - values.odd, values.odd - values.even) + values.both

        def blocks():
            score = torch.arange(data.num_items).float().repeat(len(user), 1) / data.num_items
            score[torch.arange(len(user)), data.items[stop].long() - 1] += level
            yield 1, score

        return blocks

    return scorer


def test_each_half_is_scored_with_what_the_other_half_chose(prepared):
    data = sequences.load(prepared)
    axes = [[{"even": 1.0}], [{"odd": 1.0}]]

    choice = search.search(leveled, data, Level(both=0.1), axes, filter_seen=True)

    assert (choice.folds[0].odd, choice.folds[0].even) == (1.0, 0.0)  # for even users, chosen by odd ones
    assert (choice.folds[1].odd, choice.folds[1].even) == (0.0, 1.0)
    assert choice.honest < choice.flattered


def test_the_search_takes_the_best_and_stays_where_nothing_is_better(prepared):
    data = sequences.load(prepared)
    axes = [[{"both": level} for level in (0.5, 2.0, 1.9)]]

    assert search.search(leveled, data, Level(), axes, filter_seen=True).values.both == 2.0
    assert search.search(leveled, data, Level(both=3.0), axes, filter_seen=True).values.both == 3.0


@pytest.mark.parametrize(("helpful", "alpha"), [(True, 0.0), (False, 3.0)])
def test_alpha_is_zero_for_a_model_that_counts_cannot_help(prepared, helpful, alpha):
    data = sequences.load(prepared)
    base = leveled(Level(both=5.0)) if helpful else nothing

    choice = search.choose(base, Tables(data), data, filter_seen=True, events=12)

    assert (choice.values.alpha > 0) is bool(alpha)
    assert Tables(data).scorer(base, CountsConfig(alpha=0.0), data.device) is base


def test_the_term_sees_no_more_events_than_the_model(prepared):
    data = sequences.load(prepared)

    assert search.choose(nothing, Tables(data), data, filter_seen=True, events=2).values.events == 2
