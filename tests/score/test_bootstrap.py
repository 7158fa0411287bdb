"""Intervals and paired differences, against what resampling has to give."""

import numpy as np
import pytest

from paceline.score.bootstrap import paired, tau_interval


def draws(count: int, mean: float, seed: int) -> list[tuple[float, float]]:
    """Tokens and rounds of prompts whose τ scatters around a mean."""
    generator = np.random.default_rng(seed)
    rounds = generator.integers(5, 40, count)
    return [
        (float(n * m), float(n))
        for n, m in zip(rounds, generator.normal(mean, 0.3, count), strict=True)
    ]


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(200):
        tokens, counts = zip(*draws(60, 2.0, seed), strict=True)
        low, high = tau_interval(tokens, counts, seed=seed)
        hits += low <= 2.0 <= high
    assert 175 <= hits <= 200


def test_one_prompt_gives_no_width_and_none_gives_zero():
    assert tau_interval([6.0], [3.0], seed=0) == (2.0, 2.0)
    assert tau_interval([], [], seed=0) == (0.0, 0.0)


def test_a_shift_of_every_prompt_is_found_though_prompts_scatter_more():
    first = draws(40, 2.0, 1)
    second = [(tokens + 0.1 * rounds, rounds) for tokens, rounds in first]
    found = paired(first, second, seed=0)
    assert found.value == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.1, 0.1))
    assert found.is_significant
    assert found.p_value == pytest.approx(2 / 10_001)
    back = paired(second, first, seed=0)
    assert back.value == pytest.approx(-0.1)
    assert back.is_significant


def test_equal_measurements_do_not_differ():
    same = draws(40, 2.0, 1)
    found = paired(same, same, seed=0)
    assert (found.value, found.interval, found.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert not found.is_significant


def test_without_a_true_difference_significance_is_as_rare_as_it_should_be():
    called = sum(
        paired(draws(50, 2.0, 2 * s), draws(50, 2.0, 2 * s + 1), seed=s).is_significant
        for s in range(100)
    )
    assert called <= 12


def test_memory_is_bounded_whatever_the_number_of_prompts(monkeypatch):
    same = draws(300, 2.0, 1)
    tokens, counts = zip(*same, strict=True)
    whole = tau_interval(tokens, counts, seed=3)
    monkeypatch.setattr("paceline.score.bootstrap._AT_A_TIME", 700)
    low, high = tau_interval(tokens, counts, seed=3)
    assert (low, high) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("first", "second"),
    [([], []), ([(2.0, 1.0)], []), ([(2.0, 1.0)], [(0.0, 0.0)])],
)
def test_what_cannot_be_paired_is_refused(first, second):
    with pytest.raises(ValueError, match="paired"):
        paired(first, second, seed=0)
