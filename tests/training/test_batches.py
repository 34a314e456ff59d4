"""Windows of an epoch and their batches, none of which reaches the cut; examples of tied events, and made ahead."""

import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from support import draw_windows, make_model, prepare_rows, synthetic_rows

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.models.base import Options
from seqrec.training import batches
from seqrec.training.batches import Windows
from seqrec.training.examples import Examples, ahead

CPU = torch.device("cpu")


@pytest.mark.parametrize("objective", ["causal", "cloze"])
def test_chained_windows_cover_every_target_once(data, objective):
    _, chosen = draw_windows(data, objective=objective, windows="all")

    covered = [
        (user, stop - 1 - i)
        for user, stop, width in zip(*(x.tolist() for x in chosen), strict=True)
        for i in range(width)
    ]

    first = 1 if objective == "causal" else 0
    expected = {
        (user, place)
        for user in range(data.num_users)
        for place in range(int(data.start[user]) + first, int(data.train_stop[user]))
    }
    alone = {(u, int(data.start[u])) for u in range(data.num_users)}  # a chain may leave one event, which cannot train
    assert len(covered) == len(set(covered))
    assert set(covered) <= expected
    assert expected - set(covered) <= alone


def test_a_prefix_budget_is_uniform_over_the_prefixes(data):
    counts = torch.zeros(len(data.items) + 1)
    for seed in range(300):
        _, chosen = draw_windows(data, seed=seed, objective="last", prefixes_per_user=1)
        counts[chosen.stop] += 1

    user = 0
    places = torch.arange(int(data.start[user]) + 2, int(data.train_stop[user]) + 1)
    assert counts[places].sum() == 300
    assert (counts[places] > 0.4 * 300 / len(places)).all()


def made_of(lengths: list[int]) -> Sequences:
    """Users with so many train events, one to validate on and one to test on."""
    train = torch.tensor(lengths)
    stop = (train + 2).cumsum(0)
    start = stop - train - 2
    items = torch.arange(1, int(stop[-1]) + 1, dtype=torch.int32)
    return Sequences(
        items, items.long(), start, stop - 2, stop - 2, stop - 1, stop, torch.ones(len(items) + 1).long(), {}
    )


def places(data: Sequences, chosen: Windows) -> set[tuple[int, int]]:
    """Return (user, number of events before the target) of each window."""
    before = chosen.stop - 1 - data.start[chosen.user]
    return set(zip(chosen.user.tolist(), before.tolist(), strict=True))


HISTORIES = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda lengths: max(lengths) >= 2)


@settings(deadline=None, max_examples=40)
@given(HISTORIES, st.sampled_from([0.0, 0.25, 0.5, 0.75]), st.integers(0, 3))
def test_targets_are_drawn_from_all_of_the_later_share(lengths, share, number):
    data = made_of(lengths)
    allowed = [set(range(max(1, int((n - 1) * share)), n)) for n in lengths]

    _, chosen = draw_windows(data, objective="last", earliest_target=share, prefixes_per_user=number)

    drawn = places(data, chosen)
    assert len(drawn) == len(chosen.user)
    assert drawn <= {(user, place) for user, own in enumerate(allowed) for place in own}
    wanted = [min(number or len(own), len(own)) for own in allowed]
    assert torch.bincount(chosen.user, minlength=len(lengths)).tolist() == wanted


@settings(deadline=None, max_examples=40)
@given(HISTORIES, st.sampled_from([0.01, 0.1, 0.25, 0.5]), st.sampled_from(["causal", "last", "cloze"]))
def test_a_share_of_the_users_trains_on_all_that_it_would_have(lengths, share, objective):
    data = made_of(lengths)
    everything = places(data, draw_windows(data, objective=objective)[1])

    drawn = places(data, draw_windows(data, objective=objective, user_share=share)[1])
    later = places(data, draw_windows(data, seed=9, objective=objective, user_share=share)[1])
    more = places(data, draw_windows(data, objective=objective, user_share=2 * share)[1])

    users = {user for user, _ in drawn}
    assert len(users) <= math.ceil(len(lengths) * share)
    assert drawn == {(user, place) for user, place in everything if user in users}
    assert later == drawn  # the same users in each epoch
    assert drawn <= more


def test_a_refit_that_can_train_on_more_users_keeps_most_of_those_drawn_before():
    few, more = made_of([1, 5, 5] * 100), made_of([2, 6, 6] * 100)
    before, after = (batches.trained_users(data, FinetuneConfig(user_share=0.3)) for data in (few, more))

    assert (int(before.sum()), int(after.sum())) == (60, 90)
    assert int((before & after).sum()) > 50


def test_the_users_of_a_share_are_a_draw_of_the_seed():
    data, generator = made_of([5] * 200), torch.Generator()

    def users(seed: int) -> set[int]:
        config = FinetuneConfig(seed=seed, user_share=0.1)
        return set(batches.windows(data, Options(), config, generator).user.tolist())

    for share, number in ((0.07, 7), (0.28, 28), (0.55, 55)):
        assert int(batches.trained_users(made_of([5] * 100), FinetuneConfig(user_share=share)).sum()) == number
    one, other = users(3), users(7)
    assert [len(one), len(other)] == [20, 20]
    assert len(one & other) < 10
    assert min(max(one), max(other)) >= 100  # not the first ones of the file


def test_the_users_of_a_share_are_drawn_from_those_who_can_be_trained_on():
    data, config = made_of([1] * 300 + [5] * 8), FinetuneConfig(user_share=0.003)
    assert len(set(batches.windows(data, Options(), config, torch.Generator()).user.tolist())) == 1


def test_an_epoch_visits_every_window_once_in_batches_of_equal_work():
    width = torch.randint(1, 200, (1000,), generator=torch.Generator().manual_seed(0))

    plan = batches.plan(width, 50, torch.Generator().manual_seed(1))

    assert torch.cat(plan).sort().values.tolist() == list(range(1000))
    assert len(plan) == 20
    work = torch.tensor([int(width[part].sum()) for part in plan])
    assert work.max() < 1.1 * work.float().mean()
    padded = sum(len(part) * int(width[part].max()) for part in plan)
    at_random = sum(len(part) * int(width[part].max()) for part in torch.arange(1000).split(50))
    assert padded < 1.15 * int(width.sum())
    assert at_random > 1.5 * int(width.sum())
    widths = [int(width[part].max()) for part in plan]
    assert widths != sorted(widths)


def drawn(examples):
    examples.draw(make_model("sasrec", num_items=examples.given.num_items), "train")
    return examples.data.items


def test_each_epoch_has_its_own_order_of_ties_which_a_resumed_one_draws_again(tmp_path):
    """Users have three events at a time."""
    rows = [(user, item, time // 3000) for user, item, time in synthetic_rows(users=20)]
    tied = sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))
    config = FinetuneConfig(ties="shuffle", seed=3)
    examples = Examples(tied, config, Accelerator(cpu=True))
    first, again = drawn(examples), drawn(examples)
    examples.end_epoch()
    resumed = Examples(tied, config, Accelerator(cpu=True))
    resumed.load_state_dict(examples.state_dict())
    second = drawn(examples)

    assert torch.equal(first, again)
    assert torch.equal(second, drawn(resumed))
    assert not torch.equal(first, second)
    assert not torch.equal(first, tied.items)
    assert torch.equal(next(examples.build(0, 0)).batch.items, next(resumed.build(0, 0)).batch.items)
    assert torch.equal(drawn(Examples(tied, FinetuneConfig(), Accelerator(cpu=True))), tied.items)  # ties: keep


def test_a_short_epoch_is_a_random_part_of_the_batches(data):
    model, config = make_model("sasrec", num_items=data.num_items), FinetuneConfig(batch_size=4, epoch_steps=2)
    examples = Examples(data, config, Accelerator(cpu=True))
    whole = Examples(data, replace(config, epoch_steps=0), Accelerator(cpu=True)).draw(model, "train")

    seen = []
    for _ in range(100):
        assert examples.draw(model, "train") == 2 == len(list(examples.build(0, 0))) < whole
        seen.append(torch.cat(examples.plan))
        examples.end_epoch()

    assert len({tuple(part.tolist()) for part in seen}) == 100
    assert len(torch.cat(seen).unique()) == len(examples.windows.user)


def test_one_batch_is_made_while_the_caller_works_on_another():
    made = []

    def make(place):
        made.append((place, threading.current_thread() is threading.main_thread()))
        return place

    for place in ahead(make, 4, CPU):
        deadline = time.monotonic() + 5
        while len(made) < min(place + 2, 4):
            assert time.monotonic() < deadline
        time.sleep(0.01)
        assert len(made) == min(place + 2, 4)  # the next, and no more
    assert made == [(0, False), (1, False), (2, False), (3, False)]


def test_what_fails_in_the_second_thread_is_raised_here():
    def make(place):
        if place == 1:
            raise OSError("gone")
        return place

    made = ahead(make, 3, CPU)
    assert next(made) == 0
    with pytest.raises(OSError, match="gone"):
        next(made)
