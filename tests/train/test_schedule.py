from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.durable.errors import RecipeError
from paceline.recipe.schema import TrainRecipe
from paceline.train import stage
from paceline.train.schedule import rate_factor, warmup_share
from paceline.train.source import epoch_of
from training_runs import schedule, step_events

SHARES = st.floats(0, 1)


@st.composite
def settings_of_a_rate(draw) -> dict:
    warmup = draw(st.floats(0, 0.99))
    return {
        "schedule": draw(st.sampled_from(["cosine", "wsd", "linear", "constant"])),
        "warmup": warmup,
        "decay": draw(st.floats(0.001, 1.0 - warmup)) if warmup < 0.999 else 0.001,
        "floor": draw(SHARES),
    }


def cosine(progress: float) -> float:
    return rate_factor(progress, schedule="cosine", warmup=0.1, decay=0.5, floor=0.2)


def wsd(progress: float) -> float:
    return rate_factor(progress, schedule="wsd", warmup=0.1, decay=0.2, floor=0.2)


def linear(progress: float) -> float:
    return rate_factor(progress, schedule="linear", warmup=0.1, decay=0.5, floor=0.2)


def test_linear_warms_up_and_falls_along_a_line():
    assert linear(0.05) == pytest.approx(0.5)
    assert linear(0.1) == pytest.approx(1.0)
    assert linear(0.55) == pytest.approx(0.6)
    assert linear(0.775) == pytest.approx(0.4)
    assert linear(1.0) == pytest.approx(0.2)


def test_constant_warms_up_and_stays():
    found = [
        rate_factor(p, schedule="constant", warmup=0.1, decay=0.5, floor=0.2)
        for p in (0.05, 0.1, 0.5, 1.0)
    ]
    assert found == [pytest.approx(0.5), 1.0, 1.0, 1.0]


def test_cosine_warm_up_peak_and_end():
    assert cosine(0.05) == pytest.approx(0.5)
    assert cosine(0.1) == pytest.approx(1.0)
    assert cosine(0.55) == pytest.approx(0.6)
    assert cosine(1.0) == pytest.approx(0.2)


def test_wsd_warms_up_stays_and_falls_linearly():
    assert wsd(0.05) == pytest.approx(0.5)
    assert wsd(0.1) == wsd(0.5) == wsd(0.79) == 1.0
    assert wsd(0.9) == pytest.approx(0.6)
    assert wsd(0.95) == pytest.approx(0.4)
    assert wsd(1.0) == pytest.approx(0.2)


@given(progress=SHARES, settings=settings_of_a_rate())
def test_the_factor_stays_between_0_and_1_and_above_the_floor(progress, settings):
    factor = rate_factor(progress, **settings)
    assert 0.0 <= factor <= 1.0 + 1e-12
    if progress >= settings["warmup"]:
        assert factor >= settings["floor"] - 1e-12


@given(settings=settings_of_a_rate())
def test_the_factor_ends_at_the_floor_and_reaches_the_peak(settings):
    end = 1.0 if settings["schedule"] == "constant" else settings["floor"]
    assert rate_factor(1.0, **settings) == pytest.approx(end)
    assert rate_factor(settings["warmup"], **settings) == pytest.approx(1.0)


@given(one=SHARES, other=SHARES, settings=settings_of_a_rate())
def test_the_factor_rises_in_the_warm_up_and_never_after(one, other, settings):
    first, second = sorted((one, other))
    before, after = (rate_factor(p, **settings) for p in (first, second))
    if second < settings["warmup"]:
        assert before <= after
    elif first >= settings["warmup"]:
        assert before >= after - 1e-12


@given(progress=SHARES, step=st.floats(1e-9, 1e-3), settings=settings_of_a_rate())
def test_the_factor_has_no_jumps(progress, step, settings):
    """No faster than its steepest part: the warm-up, the cosine's middle, or the decay."""
    assume(progress + step <= 1.0)
    slopes = [1.7 / (1.0 - settings["warmup"]), 1.0 / settings["decay"]]
    if settings["warmup"]:
        slopes.append(1.0 / settings["warmup"])
    rise = rate_factor(progress + step, **settings) - rate_factor(progress, **settings)
    assert abs(rise) <= max(slopes) * step * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear", "constant"])
def test_the_rate_is_the_same_for_any_batch_size(fresh_run, kind):
    """By samples consumed: a step of four has the rate that two steps of two have on average."""
    rates = {}
    for size in (2, 4):
        recipe, run_dir = fresh_run(
            batch_samples=size, schedule=kind, warmup_ratio=0.2, decay_ratio=0.4, evaluations=1
        )
        stage.run(recipe, run_dir)
        rates[size] = [e["learning_rate"] / 1e-3 for e in step_events(run_dir)]
    pairs = [sum(rates[2][i : i + 2]) / 2 for i in range(0, len(rates[2]), 2)]
    assert len(pairs) == len(rates[4]) == 10
    # Equal where the rate is linear; the cosine bends by a little between two steps.
    assert rates[4] == pytest.approx(pairs, abs=5e-3 if kind == "cosine" else 1e-9)
    assert max(rates[4]) > 0.9
    assert min(rates[4]) < 0.3 or kind == "constant"


def test_warm_up_steps_are_steps_for_any_number_of_samples_in_them(fresh_run):
    for size in (2, 4):
        recipe, run_dir = fresh_run(
            batch_samples=size, schedule="constant", warmup_steps=4, epochs=1.0, evaluations=1
        )
        stage.run(recipe, run_dir)
        rates = [e["learning_rate"] / 1e-3 for e in step_events(run_dir)]
        assert rates[:4] == pytest.approx([0.125, 0.375, 0.625, 0.875])
        assert set(rates[4:]) == {1.0}


def test_a_longer_run_has_as_many_warm_up_steps():
    recipe = TrainRecipe(batch_samples=8, warmup_steps=5)
    assert [warmup_share(recipe, total) * total for total in (400, 4000)] == [40, 40]
    assert warmup_share(replace(recipe, warmup_steps=0), 400) == 0.0
    assert warmup_share(replace(recipe, warmup_steps=None), 400) == 0.04


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 14}, "14 do not fit into the run: it has 14 steps. Lower it"),
        ({"warmup_steps": 500}, "500 do not fit into the run: it has 14 steps. Lower it"),
        (
            {"warmup_steps": 11, "schedule": "wsd", "decay_ratio": 0.25},
            "it has 14 steps, of which train.decay_ratio 0.25 falls",
        ),
    ],
)
def test_a_warm_up_longer_than_the_run_is_refused_before_it_begins(fresh_run, settings, said):
    recipe, run_dir = fresh_run(**settings)
    with pytest.raises(RecipeError) as raised:
        stage.run(recipe, run_dir)
    assert str(raised.value).startswith("train.warmup_steps: ")
    assert said in str(raised.value)
    assert not run_dir.checkpoints.exists()
    shorter = replace(recipe.train, warmup_steps=10)
    assert stage.run(replace(recipe, train=shorter), run_dir).numbers["steps"] == 14


@given(
    count=st.integers(1, 30),
    first=st.integers(0, 60),
    extra=st.integers(0, 60),
    seed=st.integers(0, 5),
)
def test_a_position_is_all_that_a_resume_needs(count, first, extra, seed):
    indices = tuple(range(100, 100 + count))
    end = first + extra
    whole = list(schedule(indices, "digest", seed=seed, first=0, end=end))
    assert whole[first:] == list(schedule(indices, "digest", seed=seed, first=first, end=end))
    for epoch in range(end // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(indices)
        assert epoch_of(epoch * count, count) == epoch
