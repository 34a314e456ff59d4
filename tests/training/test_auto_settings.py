"""Rules from the shape of the data: in their ranges, monotone, and as docs/auto.md has them."""

from __future__ import annotations

import pytest
import torch
from support import prepare_rows, synthetic_rows

from models import REGISTRY
from seqrec.config import FinetuneConfig, parse
from seqrec.data import sequences
from seqrec.training import auto_settings as auto
from seqrec.training.auto_settings import Shape


def shape(users=1_000, median=20.0, items=500, ninth=None):
    ninth = 4 * median if ninth is None else ninth
    events = int(users * median * 1.5)
    return Shape(users=users, items=items, events=events, median=median, ninth=ninth, longest=int(8 * median))


SHAPES = [shape(users, median) for users in (2, 60, 610, 6_040, 50_000, 10**7) for median in (2, 6, 20, 100, 3_000)]


@pytest.mark.parametrize("given", SHAPES, ids=lambda one: f"{one.users}x{one.median:g}")
def test_every_shape_gives_settings_in_their_ranges(given):
    for epochs in (None, 1):
        config = FinetuneConfig(**auto.finetune(given, number_of_epochs=epochs))
        total = config.epochs * auto.steps_an_epoch(given)
        assert config.warmup_steps <= total / 10
    assert 16 <= config.batch_size <= 256
    assert 20 <= auto.epochs(given) <= 100
    for architecture in ("flash4rec", "sasrec", "gru4rec"):
        options = parse(REGISTRY[architecture].Options, auto.options(architecture, given), "options")
        assert 8 <= options.length <= 200
        assert 0.2 <= options.dropout <= 0.5


def test_more_users_never_mean_smaller_batches_or_models_nor_more_epochs_or_dropout():
    grown = [shape(users) for users in (10, 100, 1_000, 10_000, 100_000, 10**6)]

    for rule in (auto.batch_size, auto.d_model, auto.layers):
        assert [rule(one) for one in grown] == sorted(rule(one) for one in grown), rule
    for rule in (auto.epochs, auto.dropout):
        assert [rule(one) for one in grown] == sorted((rule(one) for one in grown), reverse=True), rule


def test_longer_histories_never_mean_shorter_windows():
    lengths = [auto.length(shape(median=median)) for median in (1, 5, 20, 50, 500)]

    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (8, 200)


def test_a_small_log_trains_on_all_of_it_and_a_large_one_on_the_last_windows():
    assert auto.windows(shape(users=900, median=100)) == "all"
    assert auto.windows(shape(users=10**6, median=100)) == "last"
    assert auto.windows(shape(users=900, median=10, ninth=100)) == "last"  # nothing lies before the last window


def test_sparse_logs_get_one_layer_and_no_prediction_head():
    assert auto.layers(shape(users=50_000, median=6)) == 1
    assert auto.options("flash4rec", shape())["prediction_head"] is False
    with pytest.raises(ValueError, match="no automatic options for bert4rec"):
        auto.options("bert4rec", shape())


def test_the_shape_is_that_of_the_training_part(tmp_path):
    data = sequences.load(prepare_rows(tmp_path, synthetic_rows()))
    events = (data.train_stop - data.start).double()

    measured = Shape.of(data)

    assert (measured.users, measured.items) == (data.num_users, data.num_items)
    assert measured.events == int(events.sum())
    assert measured.median == float(torch.quantile(events, 0.5))
