"""Intervals against arithmetic done by hand, and against what their confidence promises."""

import numpy as np
import pytest
from support import case_table

from seqrec.evaluation import intervals, metrics


def ndcg_of_cases(generator, users, hit_rate):
    """NDCG@10 of users, most of them 0: a hit has rank r with a probability proportional to 1 / r."""
    rank = np.arange(1, 11)
    drawn = generator.choice(rank, size=users, p=1 / rank / (1 / rank).sum())
    return np.where(generator.random(users) < hit_rate, metrics.ndcg(drawn.astype(float), 10), 0.0)


def sample(kind, generator, users):
    """Return values of cases and the user of each."""
    user = np.arange(users)
    if kind == "several cases":  # few of some users and many of others, whose chances differ
        user = user.repeat(1 + generator.geometric(0.3, users))
        return ndcg_of_cases(generator, len(user), generator.beta(0.6, 5.4, users)[user]), user
    if kind == "gain":
        ours, theirs = (ndcg_of_cases(generator, users, rate) for rate in (0.3, 0.18))
        return np.where(generator.random(users) < 0.4, 0.0, ours - theirs), user
    return ndcg_of_cases(generator, users, {"usual": 0.25, "rare": 0.1}[kind]), user


@pytest.mark.parametrize("users", [30, 150])
@pytest.mark.parametrize("kind", ["usual", "rare", "several cases", "gain"])
def test_95_percent_intervals_of_few_users_hold_the_true_mean(kind, users):
    generator, draws = np.random.default_rng(7), 500
    truth = sample(kind, generator, 1_000_000)[0].mean()
    hits = 0
    for seed in range(draws):
        interval = intervals.bootstrap(
            *sample(kind, generator, users), resamples=200, seed=seed, difference=kind == "gain"
        )
        hits += interval.low <= truth <= interval.high

    assert hits / draws >= 0.935


def test_with_many_users_the_interval_is_that_of_the_normal_distribution():
    value = ndcg_of_cases(np.random.default_rng(0), 20_000, 0.25)
    interval = intervals.bootstrap(value, np.arange(20_000), resamples=1000, seed=0)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * value.std() / 20_000**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("value", "difference", "expected"),
    [([], False, (0, 0, 0)), ([0.5], False, (0.5, 0, 1)), ([0.5], True, (0.5, -1, 1)), ([0.5] * 9, True, (0.5,) * 3)],
)
def test_the_interval_of_one_user_is_all_that_is_possible(value, difference, expected):
    user = np.arange(len(value))
    assert intervals.bootstrap(np.array(value), user, resamples=100, seed=0, difference=difference) == expected


def test_bootstrap_draws_users_not_cases():
    """Copying each user's case a hundred times must not narrow the interval."""
    value, user = np.random.default_rng(1).normal(size=30), np.arange(30)

    once = intervals.bootstrap(value, user, resamples=500, seed=3)
    often = intervals.bootstrap(np.repeat(value, 100), np.repeat(user, 100), resamples=500, seed=3)

    assert often == pytest.approx(once)


def test_paired_gain_is_blind_to_row_order_and_sees_a_constant_difference():
    ranks = list(np.random.default_rng(2).integers(2, 9, 50).astype(float))
    ours, theirs = case_table(*[1.0] * 50), case_table(*ranks)
    shuffled = theirs.take(np.random.default_rng(3).permutation(50))

    assert intervals.paired_gain(ours, shuffled, seed=0) == intervals.paired_gain(ours, theirs, seed=0)
    assert intervals.paired_gain(ours, theirs, seed=0).low > 0
