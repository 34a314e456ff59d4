"""Small, coarse and repetitive data is named before training."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
from support import prepare_rows, run, synthetic_rows

from seqrec.data import sequences
from seqrec.data.data_warnings import busiest, repeats, repeats_at_once, warnings
from seqrec.data.sequences import cases, train_events

SOUND = {"users": 5_000, "items": 300, "events": 100_000, "users_without_cases": 0, "tied_events": 100}


@pytest.mark.parametrize(
    ("card", "facts", "message"),
    [
        ({}, {"steps": 20, "repeated": 0.02}, ""),
        ({"users": 999}, {}, "only 999 users"),
        ({"users_without_cases": 4_900}, {}, "only 100 of 5,000 users have validation or test events"),
        ({"users": 900, "users_without_cases": 800}, {}, "only 900 users"),
        ({"items": 10}, {}, "only 10 items"),
        ({"duplicate events": 5_000, "users outside the k-core": 400_000}, {}, ""),
        ({"duplicate events": 25_000}, {}, "20% of the events repeat the user, item and time"),
        ({"events outside the k-core": 150_000}, {}, "60% of the events are outside the k-core"),
        ({"tied_events": 87_000}, {}, "87% of the events have the same time"),
        ({"tied_events": 20_000}, {"ordered": False}, ""),
        ({"tied_events": 20_000}, {"ordered": True}, "20% of the events have the same time as the previous one, in an"),
        ({}, {"steps": 19}, "only 19 steps per epoch"),
        ({}, {"repeated": 0.5}, "50% of the events repeat an item"),
        ({}, {"repeated": 0.03}, "3% of the events repeat an item of the user: no list has such items, but as targets"),
        ({}, {"repeated": 0.5, "filter_seen": False}, ""),
        ({}, {"at_once": 0.2, "one_user": 0.1, "filter_seen": False}, ""),
        ({}, {"at_once": 0.39}, ""),
        ({}, {"at_once": 0.39, "filter_seen": False}, "39% of the events repeat the item of the event before"),
        ({}, {"one_user": 0.46}, "one user has 46% of the validation cases"),
    ],
)
def test_each_reason_has_its_sentence(card, facts, message):
    dropped = {rule: number for rule, number in card.items() if " " in rule}
    found = warnings({"counts": SOUND | card, "dropped": dropped, "deduplicate": "exact"}, **facts)

    assert len(found) == bool(message)
    assert message in "".join(found)


def test_repeats_at_other_times_are_named_as_such():
    card = {"counts": SOUND, "dropped": {"duplicate events": 25_000}, "deduplicate": "first_pair"}
    assert warnings(card) == ["20% of the events repeat the user and item of another event and are left out"]


def test_repeats_are_those_of_a_user_in_training(prepared, tmp_path):
    rows = [(f"u{user}", f"i{event % 3}", 1_000_000 + event) for user in range(6) for event in range(8)]
    data = sequences.load(prepare_rows(tmp_path, rows, deduplicate="none"))

    assert repeats(data) == pytest.approx(1 - 3 / 6)  # 6 of 8 events are training, of 3 items
    assert 0 < repeats(sequences.load(prepared)) < 0.5


def test_a_user_with_a_tenth_of_the_events_is_no_person(tmp_path):
    rows = [(f"u{n // 6}", f"i{n % 6}", n) for n in range(120)] + [("-1", "i1", n) for n in range(100)]

    assert repeats(sequences.load(prepare_rows(tmp_path, rows, min_user_events=1, min_item_events=1))) == 0


def test_repeats_at_once_and_the_busiest_user(tmp_path):
    rows = [(f"u{user}", f"i{event // 2 % 3}", 1_000_000 + event) for user in range(6) for event in range(8)]
    rows += [("u0", f"i{event % 3}", 1_000_008 + event) for event in range(400)]
    data = sequences.load(prepare_rows(tmp_path, rows, deduplicate="none", protocol="temporal"))
    user, item = train_events(data)
    pairs = list(zip(user.tolist(), item.tolist(), strict=True))
    assert sum(map(operator.eq, pairs, pairs[1:])) == repeats_at_once(data) * len(pairs) > 0

    of_user = Counter(cases(data, "valid").user.tolist())
    assert busiest(data) == pytest.approx(max(of_user.values()) / of_user.total())
    assert max(of_user.values()) > 10


def test_training_warns_of_what_repeats_at_once_and_of_an_order_within_one_time(tmp_path, caplog):
    rows = [(user, item, time // 3000) for user, item, time in synthetic_rows() for _ in range(2)]

    run(prepare_rows(tmp_path / "data", rows, deduplicate="none"), tmp_path / "run", epochs=1, filter_seen=False)

    assert "repeat the item of the event before" in caplog.text
    assert "in an order that is not random" in caplog.text
