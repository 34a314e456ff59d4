"""The filter of seen items, by hand."""

import pytest
import torch
from support import prepare_rows

from seqrec.data import sequences
from seqrec.evaluation.seen_items import SeenItems


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Users u: a b a c, v: b; items a, b, c = 1, 2, 3."""
    rows = [(user, item, time) for user, row in {"u": "abac", "v": "b"}.items() for time, item in enumerate(row)]
    return sequences.load(prepare_rows(tmp_path_factory.mktemp("two"), rows, min_user_events=1, min_item_events=1))


def pairs(seen):
    return sorted(zip(seen.row.tolist(), seen.item.tolist(), strict=True))


def test_a_repeated_item_counts_once_and_an_empty_history_holds_none(data):
    seen = SeenItems.before(data, torch.tensor([1, 0]), torch.tensor([4, 3]))

    assert pairs(seen) == [(1, 1), (1, 2)]


def test_the_target_stays_a_candidate(data):
    seen = SeenItems.before(data, torch.tensor([0, 0]), torch.tensor([3, 4]))

    assert pairs(seen.without(torch.tensor([1, 3]))) == [(0, 2), (1, 1), (1, 2)]


def test_columns_are_those_of_the_block(data):
    seen = SeenItems.before(data, torch.tensor([0]), torch.tensor([4]))
    score = torch.zeros(1, 2)

    score[seen.within(2, score)] = 1

    assert score.tolist() == [[1, 1]]  # of items 2 and 3; item 1 lies before the block
