"""The choice of a budget by tau over cost, on costs with a known optimum and on measured ones."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafting import load_tiny_target
from paceline.decode.attention_state import AttentionState
from paceline.decode.auto_budget import (
    CostCurve,
    RoundCosts,
    choose_budget,
    measure_costs,
    verify_costs,
)
from paceline.decode.session import open_session
from paceline.types.tree import DraftTree

TAPS = (1, 2, 3)


def linear(base, slope, top=1025):
    return CostCurve((1, top), (base + slope, base + slope * top))


TAU = {None: 3.0, 16: 3.6, 64: 4.4, 256: 5.0, 1024: 5.4}


@pytest.mark.parametrize(
    ("slope", "wanted"), [(0.0, 1024), (0.0005, 256), (0.003, 64), (0.02, 16), (1.0, None)]
)
def test_the_cheaper_rows_are_the_larger_the_budget(slope, wanted):
    costs = RoundCosts(draft=0.2, verify=linear(1.0, slope))
    chosen = choose_budget(TAU, costs, drafted=7)
    rates = {b: TAU[b] / (0.2 + 1.0 + slope * (8 if b is None else b + 1)) for b in TAU}
    assert chosen.budget == wanted == max(rates, key=rates.__getitem__)
    assert [rate.budget for rate in chosen.table] == list(TAU)
    for rate in chosen.table:
        assert rate.speedup == pytest.approx(rates[rate.budget] * (1.0 + slope))
        assert rate.tau == TAU[rate.budget]


def test_the_sentence_says_when_the_chain_wins():
    costs = RoundCosts(draft=0.0, verify=CostCurve((1, 8, 17, 65), (1.0, 1.0, 1.6, 4.0)))
    chosen = choose_budget({None: 3.0, 16: 4.0, 64: 4.5}, costs, drafted=7)
    assert chosen.budget is None
    assert chosen.sentence == (
        "the chain wins: ddtree-16, the best tree, decodes 0.83 times as fast as the chain, with a "
        "tau of 4.00 for 3.00 and rounds that cost 1.60 times as much"
    )


def test_the_sentence_says_when_a_tree_wins_and_when_a_larger_one_might():
    costs = RoundCosts(draft=0.0, verify=CostCurve((1, 65), (1.0, 1.0)))
    chosen = choose_budget({None: 2.0, 16: 3.0, 64: 2.5}, costs, drafted=7)
    assert chosen.sentence == (
        "ddtree-16 wins: it decodes 1.50 times as fast as the chain, with a tau of 3.00 for 2.00 "
        "and rounds that cost 1.00 times as much"
    )
    chosen = choose_budget({None: 2.0, 16: 3.0, 64: 4.0}, costs, drafted=7)
    assert chosen.budget == 64
    assert "the largest budget that was compared, and a larger one may be better" in chosen.sentence


def test_the_sentence_says_when_no_draft_pays():
    costs = RoundCosts(draft=2.0, verify=linear(1.0, 0.1))
    chosen = choose_budget({None: 1.2, 16: 1.4}, costs, drafted=7)
    assert chosen.budget is None
    assert "Plain decoding is faster still: chain reaches 0.35x of it" in chosen.sentence
    assert "no budget was compared" in choose_budget({None: 3.0}, costs, drafted=7).sentence


def test_the_time_of_the_tree_counts():
    verify = CostCurve((1, 1025), (1.0, 1.0))
    tree = CostCurve((16, 1024), (0.0, 1.0))
    tau = {None: 2.0, 16: 3.0, 1024: 4.0}
    assert choose_budget(tau, RoundCosts(0.5, verify), drafted=7).budget == 1024
    assert choose_budget(tau, RoundCosts(0.5, verify, tree), drafted=7).budget == 16


def test_of_equal_ones_the_smaller_budget_wins_and_the_chain_before_any():
    costs = RoundCosts(draft=0.0, verify=CostCurve((1, 65), (1.0, 1.0)))
    assert choose_budget({64: 2.0, 16: 2.0, None: 1.0}, costs, drafted=7).budget == 16
    assert choose_budget({64: 2.0, 16: 2.0, None: 2.0}, costs, drafted=7).budget is None


def test_what_was_not_measured_is_not_guessed():
    costs = RoundCosts(draft=0.0, verify=CostCurve((1, 17), (1.0, 2.0)))
    with pytest.raises(ValueError, match="no time for 65: measured were 1 to 17"):
        choose_budget({None: 2.0, 64: 3.0}, costs, drafted=7)
    with pytest.raises(ValueError, match="needs the chain's tau"):
        choose_budget({16: 3.0}, costs, drafted=7)
    with pytest.raises(ValueError, match="takes no time"):
        choose_budget({None: 2.0}, RoundCosts(0.0, CostCurve((1, 9), (0.0, 0.0))), drafted=7)


@given(
    points=st.dictionaries(st.integers(1, 300), st.floats(0, 10), min_size=2, max_size=8),
    part=st.floats(0, 1),
)
def test_a_curve_is_linear_between_what_was_measured(points, part):
    sizes = tuple(sorted(points))
    curve = CostCurve(sizes, tuple(points[size] for size in sizes))
    for size in sizes:
        assert curve.at(size) == points[size]
    for low, high in itertools.pairwise(sizes):
        size = low + round(part * (high - low))
        wanted = points[low] + (points[high] - points[low]) * (size - low) / (high - low)
        assert curve.at(size) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((), (), "at least one size"),
        ((1, 2), (1.0,), "one time for each size"),
        ((2, 1), (1.0, 1.0), "sizes must rise"),
        ((1, 2), (1.0, float("nan")), "0 or more"),
        ((1, 2), (1.0, -1.0), "0 or more"),
    ],
)
def test_a_curve_that_is_none_is_refused(sizes, seconds, said):
    with pytest.raises(ValueError, match=said):
        CostCurve(sizes, seconds)


def test_the_shortest_time_counts_after_a_warm_up_and_with_the_wait_for_the_device():
    """On a clock that only work and waiting move: 100 s the first time, then 3, 2, 1 more."""
    now, seen, owed = [0.0], [], [0.0]

    def work(size):
        times = seen.count(size)
        seen.append(size)
        now[0] += size
        owed[0] = 100.0 if times == 0 else 4.0 - times

    def wait():
        now[0] += owed[0]
        owed[0] = 0.0

    curve = measure_costs(work, (8, 2, 8), repeats=3, clock=lambda: now[0], synchronize=wait)
    assert curve == CostCurve((2, 8), (3.0, 9.0))
    assert seen == [2, 8] * 4, "in turns"
    with pytest.raises(ValueError, match="1 repeat or more, not 0"):
        measure_costs(work, (1,), repeats=0)


@pytest.mark.parametrize("clock", [None, time.process_time])
def test_a_real_target_is_measured_and_its_budget_chosen(tmp_path, monkeypatch, clock):
    target = load_tiny_target(tmp_path)
    rows = (1, 4, 17, 65, 257)
    seen = []
    verify = AttentionState.verify

    def watched(self, trees):
        seen.append((len(trees[0]), self.lengths[0]))
        return verify(self, trees)

    monkeypatch.setattr(AttentionState, "verify", watched)
    curve = verify_costs(target, [5, 17, 90, 33, 8], rows, taps=TAPS, repeats=2, clock=clock)
    assert curve.sizes == rows
    assert all(seconds > 0 for seconds in curve.seconds)
    assert seen == [(size, 5) for size in rows] * 3, "always behind the prompt alone"
    costs = RoundCosts(draft=curve.at(1), verify=curve)
    tau = {None: 2.0, 16: 2.5, 64: 3.0, 256: 3.1}
    spent = dict(zip((None, 16, 64, 256), curve.seconds[1:], strict=True))
    rates = {budget: tau[budget] / (curve.seconds[0] + spent[budget]) for budget in tau}
    assert choose_budget(tau, costs, drafted=3).budget == max(rates, key=rates.__getitem__)


def test_a_measured_target_decodes_on_as_before(tmp_path):
    """A verification that nothing is committed of leaves the cache as it was."""
    target = load_tiny_target(tmp_path)
    session = open_session(target, TAPS)
    session.prefill([[5, 17, 90]])
    [wanted] = session.verify([DraftTree.chain(8, ())])
    session.verify([DraftTree.chain(8, (9, 10))])
    [again] = session.verify([DraftTree.chain(8, ())])
    assert again.equal(wanted)
