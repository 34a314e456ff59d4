"""Events of a user at the same time: whether their order is random, and their shuffling."""

from collections import Counter

import numpy as np
import pytest
import torch
from support import prepare_rows

from seqrec.data import sequences, ties


def rows(order, users=60, days=6, size=3, items=30):
    """Users with `size` items a day, all at one time; `order` says in which order the file has them."""
    draw = np.random.default_rng(0)
    orders = {
        "sorted": sorted,
        "random": draw.permutation,
        "half": lambda group: sorted(group) if draw.random() < 0.5 else draw.permutation(group),
    }
    groups = draw.permuted(np.tile(np.arange(items), (users * days, 1)), axis=1)[:, :size]
    return [
        (f"u{n // days}", f"i{item:02}", 86_400 * (n % days))
        for n, group in enumerate(groups)
        for item in orders[order](group)
    ]


def load(folder, order, **options):
    return sequences.load(prepare_rows(folder, rows(order, **options), min_user_events=1, min_item_events=1))


@pytest.mark.parametrize(
    ("order", "options", "expected"),
    [
        ("sorted", {}, True),
        ("random", {}, False),
        ("half", {}, True),
        ("sorted", {"users": 2, "days": 2}, False),  # no pair of items that two users have
        ("sorted", {"size": 2, "items": 2}, True),  # one pair, on whose order many users agree
        ("random", {"size": 1}, True),  # no ties
    ],
)
def test_a_random_order_is_told_from_one_that_users_agree_on(tmp_path, order, options, expected):
    assert ties.are_ordered(load(tmp_path, order, **options)) is expected


def test_agreement_is_the_share_of_pairs_of_users_with_the_same_order(tmp_path):
    """Items a and b at one time: three users have a first and one b, so that 3 of 6 pairs of users agree."""
    days = {"u": "ab", "v": "ab", "w": "ab", "x": "ba", "y": "cd", "z": "cd"}
    log = [
        (user, item, time) for user, day in days.items() for item, time in [*((i, 1) for i in day), ("e", 2), ("f", 3)]
    ]
    data = sequences.load(prepare_rows(tmp_path, log, min_user_events=1, min_item_events=1))

    agreed, error = ties.agreement(data)
    assert agreed == (3 / 6 + 1) / 2
    assert error == pytest.approx((0.25 / 6 + 0.25) ** 0.5 / 2)
    assert not ties.are_ordered(data)  # so few users can agree by chance


def test_where_few_events_are_tied_their_order_does_not_matter(tmp_path):
    """One event in 36, then one in 12, has the time of the event before, in a random order."""
    for share, folder in ((36, "few"), (12, "some")):
        log = [
            (f"u{user:03}", f"i{item:02}", time - (time % share == 1))
            for user in range(100)
            for time, item in enumerate(np.random.default_rng(user).permutation(36))
        ]
        data = sequences.load(prepare_rows(tmp_path / folder, log, min_user_events=1, min_item_events=1))
        assert ties.are_ordered(data) is (folder == "few")


def test_only_training_events_of_the_same_time_change_places(tmp_path):
    data = load(tmp_path, "sorted")
    event, group = ties.groups(data)

    shuffled = ties.shuffled(data, event, group, torch.Generator().manual_seed(0))

    moved = (shuffled.items != data.items).nonzero().flatten()
    user, training = sequences.ranges(data.start, data.train_stop - data.start)
    assert set(moved.tolist()) <= set(training.tolist())
    assert len(moved) > len(training) / 3
    before, after = (
        Counter(zip(user.tolist(), one.times[training].tolist(), one.items[training].tolist(), strict=True))
        for one in (data, shuffled)
    )
    assert before == after
    assert shuffled.times is data.times


def test_mirrored_events_are_those_of_a_log_whose_days_are_read_backwards(tmp_path):
    data = load(tmp_path, "random")
    training = sequences.ranges(data.start, data.train_stop - data.start)[1]

    mirrored = ties.mirrored(data).items

    days = {}
    for index in training.tolist():
        user = int((data.start <= index).sum())
        days.setdefault((user, int(data.times[index])), []).append(int(data.items[index]))
    assert mirrored[training].tolist() == [item for day in days.values() for item in reversed(day)]
    rest = torch.ones(len(mirrored), dtype=torch.bool)
    rest[training] = False
    assert torch.equal(mirrored[rest], data.items[rest])


def test_every_order_is_equally_likely(tmp_path):
    data = load(tmp_path, "sorted", users=2)
    event, group = ties.groups(data)
    found, generator = Counter(), torch.Generator().manual_seed(0)
    for _ in range(3_000):
        found[tuple(ties.shuffled(data, event, group, generator).items[:3].tolist())] += 1

    assert len(found) == 6
    assert max(found.values()) < 1.25 * min(found.values())
