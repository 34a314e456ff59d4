"""Windows, inputs and targets of every objective; no target of training is at or after the cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_model

from models.base import Options
from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.data.sequences import Sequences
from seqrec.training import objectives
from seqrec.training.objectives import Windows


@pytest.fixture
def data(prepared):
    return sequences.load(prepared)


def windows(data, seed=0, length=5, objective="causal", **config):
    options = Options(length=length, objective=objective)
    generator = torch.Generator().manual_seed(seed)
    return options, objectives.windows(data, options, FinetuneConfig(**config), generator)


def train_events(data, user):
    return data.items[data.start[user] : data.train_stop[user]].tolist()


def test_causal_positions_predict_the_next_event(data):
    options, chosen = windows(data, length=12)

    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)

    assert example.number == int(chosen.width.sum()) == int((example.target_BL > 0).sum())
    assert example.weight == pytest.approx(1 / example.number)
    for row, user in enumerate(chosen.user.tolist()):
        events = train_events(data, user)[-13:]
        real = example.batch.items[row] > 0
        assert example.batch.items[row][real].tolist() == events[:-1]
        assert example.target_BL[row][real].tolist() == events[1:]
        assert (example.target_BL[row][~real] == 0).all()


def test_last_windows_are_one_a_user(data):
    _, chosen = windows(data)

    assert chosen.user.tolist() == list(range(data.num_users))
    assert chosen.stop.tolist() == data.train_stop.tolist()
    assert chosen.width.unique().tolist() == [5]


@pytest.mark.parametrize("objective", ["causal", "cloze"])
def test_chained_windows_cover_every_target_once(data, objective):
    _, chosen = windows(data, objective=objective, windows="all")

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


def test_last_takes_every_prefix(data):
    options, chosen = windows(data, objective="last", length=4)

    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)

    assert len(chosen.user) == int((data.train_stop - data.start - 1).sum()) == example.number
    assert (example.target_BL[:, :-1] == 0).all()
    for row, (user, stop) in enumerate(zip(chosen.user.tolist(), chosen.stop.tolist(), strict=True)):
        place = stop - int(data.start[user])
        events = train_events(data, user)[:place]
        assert example.target_BL[row, -1] == events[-1]
        kept = example.batch.items[row][example.batch.items[row] > 0].tolist()
        assert kept == events[:-1][-4:]


def test_a_prefix_budget_draws_anew_each_epoch(data):
    _, one = windows(data, objective="last", prefixes_per_user=3)
    _, two = windows(data, seed=1, objective="last", prefixes_per_user=3)

    assert torch.bincount(one.user).tolist() == [3] * data.num_users
    assert len({*zip(one.user.tolist(), one.stop.tolist(), strict=True)}) == len(one.user)
    assert one.stop.tolist() != two.stop.tolist()
    assert (one.stop >= data.start[one.user] + 2).all()
    assert (one.stop <= data.train_stop[one.user]).all()


def test_a_prefix_budget_is_uniform_over_the_prefixes(data):
    counts = torch.zeros(len(data.items) + 1)
    for seed in range(300):
        _, chosen = windows(data, seed=seed, objective="last", prefixes_per_user=1)
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
    return Sequences(items, items.long(), start, stop - 2, stop - 1, stop, torch.ones(len(items) + 1).long(), {})


def places(data: Sequences, chosen: Windows) -> set[tuple[int, int]]:
    """Return (user, number of events before the target) of each window."""
    before = chosen.stop - 1 - data.start[chosen.user]
    return set(zip(chosen.user.tolist(), before.tolist(), strict=True))


HISTORIES = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda lengths: max(lengths) >= 2)


def test_no_target_comes_before_the_earliest():
    data = made_of([7, 6, 2, 1])

    _, chosen = windows(data, objective="last", earliest_target=0.5)

    assert places(data, chosen) == {(0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1)}


@settings(deadline=None, max_examples=40)
@given(HISTORIES, st.sampled_from([0.0, 0.25, 0.5, 0.75]), st.integers(0, 3))
def test_targets_are_drawn_from_all_of_the_later_share(lengths, share, number):
    data = made_of(lengths)
    allowed = [set(range(max(1, int((n - 1) * share)), n)) for n in lengths]

    _, chosen = windows(data, objective="last", earliest_target=share, prefixes_per_user=number)

    drawn = places(data, chosen)
    assert len(drawn) == len(chosen.user)
    assert drawn <= {(user, place) for user, own in enumerate(allowed) for place in own}
    wanted = [min(number or len(own), len(own)) for own in allowed]
    assert torch.bincount(chosen.user, minlength=len(lengths)).tolist() == wanted


@settings(deadline=None, max_examples=40)
@given(HISTORIES, st.sampled_from([0.01, 0.1, 0.25, 0.5]), st.sampled_from(["causal", "last", "cloze"]))
def test_a_share_of_the_users_trains_on_all_that_it_would_have(lengths, share, objective):
    data = made_of(lengths)
    everything = places(data, windows(data, objective=objective)[1])

    drawn = places(data, windows(data, objective=objective, user_share=share)[1])
    later = places(data, windows(data, seed=9, objective=objective, user_share=share)[1])
    more = places(data, windows(data, objective=objective, user_share=2 * share)[1])

    users = {user for user, _ in drawn}
    assert len(users) <= math.ceil(len(lengths) * share)
    assert drawn == {(user, place) for user, place in everything if user in users}
    assert later == drawn  # the same users in each epoch
    assert drawn <= more


def test_the_users_of_a_share_are_a_draw_of_the_seed():
    data, generator = made_of([5] * 200), torch.Generator()

    def users(seed: int) -> set[int]:
        config = FinetuneConfig(seed=seed, user_share=0.1)
        return set(objectives.windows(data, Options(), config, generator).user.tolist())

    one, other = users(3), users(7)
    assert [len(one), len(other)] == [20, 20]
    assert len(one & other) < 10
    assert min(max(one), max(other)) >= 100  # not the first ones of the file


def test_cloze_masks_what_it_predicts(data):
    options, chosen = windows(data, objective="cloze", length=12)
    config = FinetuneConfig(mask_probability=0.3, mask_last_share=0.0)

    example = objectives.example(data, options, config, chosen, seed=4)

    mask = data.num_items + 1
    masked = example.batch.items == mask
    assert torch.equal(masked, example.target_BL > 0)
    assert example.number == int(masked.sum())
    assert masked.any(1).all()
    restored = torch.where(masked, example.target_BL, example.batch.items)
    assert torch.equal(restored, sequences.window(data, chosen.user, chosen.stop, 12).items)
    assert 0.2 < masked.sum() / (restored > 0).sum() < 0.4
    again = objectives.example(data, options, config, chosen, seed=4)
    other = objectives.example(data, options, config, chosen, seed=5)
    assert torch.equal(again.batch.items, example.batch.items)
    assert not torch.equal(other.batch.items, example.batch.items)


def test_cloze_masks_the_last_event_of_a_share(data):
    options, chosen = windows(data, objective="cloze", length=12)

    example = objectives.example(data, options, FinetuneConfig(mask_last_share=1.0), chosen, seed=0)

    assert (example.target_BL[:, :-1] == 0).all()
    assert (example.target_BL[:, -1] > 0).all()


@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_processes_share_a_step(data, objective):
    options, chosen = windows(data, objective=objective)
    config = FinetuneConfig()

    whole = objectives.example(data, options, config, chosen, seed=3)
    parts = [objectives.example(data, options, config, chosen, seed=3, process=p, processes=2) for p in (0, 1)]

    assert sum(part.number for part in parts) == whole.number
    for process, part in enumerate(parts):
        assert torch.equal(part.batch.items, whole.batch.items[process::2])
        assert torch.equal(part.target_BL, whole.target_BL[process::2])
        assert part.weight == pytest.approx(2 * whole.weight)


def test_an_epoch_visits_every_window_once_in_batches_of_equal_work():
    width = torch.randint(1, 200, (1000,), generator=torch.Generator().manual_seed(0))

    plan = objectives.plan(width, 50, torch.Generator().manual_seed(1))

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


def test_the_loss_of_a_step_is_the_mean_over_its_targets(data):
    from seqrec.training import loop

    model = make_model("sasrec", num_items=data.num_items, dropout=0.0)
    _, every = windows(data, length=12)
    chosen = Windows(*(x[:5] for x in every))
    example = objectives.example(data, model.options, FinetuneConfig(), chosen, seed=0)
    loss = objectives.Loss(FinetuneConfig(), data.count)

    terms = loop._Step(model, loss, FinetuneConfig())(example)

    target = example.target_BL
    scores = (model(example.batch) @ model.item_vectors().T)[..., 1:]
    expected = torch.nn.functional.cross_entropy(scores[target > 0], target[target > 0] - 1)
    torch.testing.assert_close(terms["task"], expected)


@pytest.mark.parametrize("sampler", ["uniform", "popularity"])
def test_negatives_follow_their_distribution(sampler):
    count = torch.tensor([0, 6, 0, 3, 1])
    loss = objectives.Loss(FinetuneConfig(sampler=sampler, negatives=10), count)

    drawn = torch.bincount(loss.draw(torch.tensor([1]), 20_000), minlength=5) / 20_000

    share = torch.tensor([0, 1, 1, 1, 1]) / 4 if sampler == "uniform" else count / 10
    torch.testing.assert_close(drawn, share, atol=0.015, rtol=0)
    torch.testing.assert_close(loss.log_expected_V.exp(), 10 * share, atol=1e-6, rtol=1e-5)


def test_negatives_in_the_batch_are_its_targets_in_their_proportion():
    loss = objectives.Loss(FinetuneConfig(sampler="in_batch", negatives=10), torch.tensor([0, 6, 1, 3, 0]))

    drawn = torch.bincount(loss.draw(torch.tensor([1, 1, 1, 3]), 20_000), minlength=5) / 20_000

    torch.testing.assert_close(drawn, torch.tensor([0, 0.75, 0, 0.25, 0]), atol=0.015, rtol=0)
    torch.testing.assert_close(loss.log_expected_V.exp()[1:4], torch.tensor([6.0, 1.0, 3.0]))  # expected of any step


@pytest.mark.parametrize("objective", ["causal", "last", "cloze"])
def test_the_past_of_a_target_is_the_users_events_before_it(data, objective):
    """With cloze also the ones behind it: all that the model is shown."""
    options, chosen = windows(data, objective=objective)
    example = objectives.example(data, options, FinetuneConfig(), chosen, seed=0)
    positions = 1 if objective == "last" else 5  # what the models of the objective return
    target_BP = example.target_BL[:, -positions:]
    place_N = target_BP.flatten().nonzero()[:, 0]

    past = objectives.past(example, options, place_N, positions)

    for n, place in enumerate(place_N.tolist()):
        row, column = divmod(place, positions)
        events = [0] * 6 + data.items[data.start[chosen.user[row]] : chosen.stop[row]].tolist()
        if objective == "cloze":
            targets = example.target_BL[row].tolist()
            expected = [item for item, target in zip(events[-5:], targets, strict=True) if item and not target]
        else:
            expected = [item for item in events[-6:-1][: column + 6 - positions] if item]
        shown = past.items_BL[past.row_N[n]][: past.stop_N[n]].tolist()
        assert [item for item in shown if item not in (0, data.num_items + 1)] == expected


@pytest.mark.parametrize(
    ("number", "batch_size", "processes", "sizes"),
    [(100, 32, 1, [32] * 3), (100, 33, 2, [32] * 3), (20, 64, 1, [20]), (21, 64, 2, [20]), (64, 64, 4, [64])],
)
def test_batches_of_a_contrast_have_the_asked_size(number, batch_size, processes, sizes):
    plan = objectives.plan_of_size(number, batch_size, processes, torch.Generator().manual_seed(1))

    assert [len(batch) for batch in plan] == sizes
    chosen = torch.cat(plan)
    assert len(chosen.unique()) == len(chosen)
    assert not torch.equal(chosen, chosen.sort().values)
