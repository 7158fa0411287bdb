from functools import partial

import pytest

from paceline.score.aggregate import acceptance as measured
from paceline.score.aggregate import losslessness
from paceline.score.cost import cost, plain_timings, timing
from paceline.score.results import MethodResult, PromptResult

acceptance = partial(measured, depths=3)


def result(
    prompt_id: str, rounds: tuple[int, ...], *, turn: int = 0, **method: object
) -> PromptResult:
    settings = {"how": "decoded", "identical": True, "walk_rounds": rounds, **method}
    return PromptResult(
        prompt_id=prompt_id,
        dataset="d",
        domain="d",
        language="en",
        turn=turn,
        temperature=0.0,
        prompt_tokens=3,
        answer_ids=(1,) * (1 + sum(rounds)),
        finish="length",
        plain_steps=10,
        plain_cpu_seconds={"prefill": 5.0, "verify": 0.9, "commit": 0.1},
        plain_wall_seconds=2.0,
        methods={"chain": MethodResult(rounds=rounds, **settings)},
    )


def test_t_77_three_rounds_with_a_known_answer():
    """Accepted flags [1,1,0], [1,0,0], [0,0,0] of 3 drafted tokens each."""
    found = acceptance([result("a", (3, 2, 1))], "chain", seed=0)
    assert found.tau == pytest.approx(2.0), "with the bonus token"
    assert found.tau - 1 == pytest.approx(1.0), "mean accepted"
    assert found.rate == pytest.approx(3 / 9)
    assert sum(found.by_depth) == pytest.approx(3 / 3)
    assert found.by_depth == pytest.approx((2 / 3, 1 / 3))
    assert found.conditional == pytest.approx((2 / 3, 1 / 2, 0 / 1))


def test_a_depth_that_no_round_got_to_has_no_conditional_acceptance():
    found = acceptance([result("a", (2, 1))], "chain", seed=0)
    assert found.conditional == (1 / 2, 0.0), "at depth 3 there is nothing to divide by"
    full = acceptance([result("a", (4, 4))], "chain", seed=0)
    assert full.conditional == (1.0, 1.0, 1.0)
    assert full.rate == 1.0


def test_the_turns_of_a_prompt_are_one_prompt():
    results = [result("a", (4, 4)), result("a", (1, 1), turn=1), result("b", (2,))]
    found = acceptance(results, "chain", seed=0)
    assert (found.prompts, found.rounds) == (2, 5)
    assert found.tau_prompt_mean == pytest.approx((10 / 4 + 2) / 2)


def test_pitfall_26_both_averages_and_the_bonus_token():
    results = [result("a", (4, 4)), result("b", (1, 1, 1, 1, 1, 1))]
    found = acceptance(results, "chain", seed=0)
    assert found.tau == pytest.approx(14 / 8), "pooled: tokens over rounds"
    assert found.tau_prompt_mean == pytest.approx((4.0 + 1.0) / 2)
    assert found.tau == pytest.approx(1 + sum(found.by_depth))
    low, high = found.tau_interval
    assert low <= found.tau <= high


def test_a_prompt_whose_answer_is_one_token_has_no_round():
    results = [result("a", ()), result("b", (2, 2))]
    found = acceptance(results, "chain", seed=0)
    assert found.prompts == 2
    assert found.tau == found.tau_prompt_mean == 2.0
    assert acceptance(results[:1], "chain", seed=0).tau == 0.0


def test_speed_up_is_tau_over_the_cost_of_a_round():
    seconds = {"prefill": 9.0, "verify": 0.4, "draft": 0.06, "tree": 0.04, "commit": 0.02}
    found = cost([result("a", (3, 1), cpu_seconds=seconds, wall_seconds=1.6)], "chain")
    # A plain step is 0.1 s; a round verifies for 0.2 s and drafts for 0.05 s.
    assert found.verify == pytest.approx(2.0)
    assert found.draft == pytest.approx(0.5)
    assert found.overhead == pytest.approx(0.1)
    assert found.speedup_cpu == pytest.approx(2.0 / 2.6)
    assert found.speedup_wall == pytest.approx(0.2 / 0.4)
    assert found.projected["1"] == pytest.approx(2.0 / 1.6)
    assert found.projected_free_draft["1.25"] == pytest.approx(1.6)


def test_a_walk_has_no_cost():
    assert cost([result("a", (2,), how="walk")], "chain") is None


def test_differences_are_near_ties_or_violations():
    results = [
        result("same", (2,)),
        result("tie", (2,), identical=False, divergence=3, margin=1e-5),
        result("wrong", (2,), identical=False, divergence=3, margin=0.5),
        result("walk", (2,), walk_rounds=(1, 1)),
    ]
    found = losslessness(results, "float32")
    assert (found.checked, found.identical, found.near_ties) == (4, 2, 1)
    assert found.violations == ("wrong/chain@3",)
    assert (found.walk_checked, found.walk_equal) == (2, 1)


SECONDS = {"prefill": 9.0, "verify": 0.4, "draft": 0.06, "tree": 0.04, "commit": 0.02}


def test_seconds_are_summed_by_phase_over_answers():
    results = [
        result("a", (3, 1), cpu_seconds=SECONDS, wall_seconds=1.5),
        result("b", (2,), cpu_seconds=SECONDS, wall_seconds=0.5),
    ]
    found = timing(results, "chain")
    assert (found.rounds, found.tokens, found.wall_seconds) == (3, 6, 2.0)
    assert found.cpu_seconds == {phase: 2 * s for phase, s in SECONDS.items()}
    assert found.phase_seconds == {}, "wall time by phase was not measured"
    assert timing([*results, result("c", (2,), how="walk")], "chain") is None
    plain = plain_timings(results)["plain"]
    assert (plain.rounds, plain.cpu_seconds["verify"], plain.wall_seconds) == (20, 1.8, 4.0)


def test_wall_time_by_phase_is_that_of_all_answers_or_of_none():
    one = result("a", (3,), cpu_seconds=SECONDS, wall_seconds=1.0, phase_seconds={"draft": 0.25})
    two = result("b", (3,), cpu_seconds=SECONDS, wall_seconds=1.0)
    assert timing([one, one], "chain").phase_seconds == {"draft": 0.5}
    assert timing([one, two], "chain").phase_seconds == {}
