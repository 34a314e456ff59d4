"""With `ties: shuffle`, an epoch sees tied events in an order of its own, also after an interruption."""

import pytest
import torch
from accelerate import Accelerator
from support import make_model, prepare_rows, synthetic_rows

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.training.examples import Examples


@pytest.fixture
def data(tmp_path):
    """Users have three events at a time."""
    rows = [(user, item, time // 3000) for user, item, time in synthetic_rows(users=20)]
    return sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))


def drawn(examples):
    examples.draw(make_model("sasrec", num_items=examples.given.num_items), "train")
    return examples.data.items


def test_each_epoch_has_its_own_order_which_a_resumed_one_draws_again(data):
    config = FinetuneConfig(ties="shuffle", seed=3)
    examples = Examples(data, config, Accelerator(cpu=True))
    first, again = drawn(examples), drawn(examples)
    examples.end_epoch()
    resumed = Examples(data, config, Accelerator(cpu=True))
    resumed.load_state_dict(examples.state_dict())
    second = drawn(examples)

    assert torch.equal(first, again)
    assert torch.equal(second, drawn(resumed))
    assert not torch.equal(first, second)
    assert not torch.equal(first, data.items)
    assert torch.equal(next(examples.build(0, 0)).batch.items, next(resumed.build(0, 0)).batch.items)


def test_kept_ties_are_those_of_the_data(data):
    assert torch.equal(drawn(Examples(data, FinetuneConfig(), Accelerator(cpu=True))), data.items)
