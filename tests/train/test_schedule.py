import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.schedule import cosine
from paceline.train.source import epoch_of, schedule


def test_warm_up_peak_and_end():
    def rate(progress: float) -> float:
        return cosine(progress, warmup=0.1, floor=0.2)

    assert rate(0.05) == pytest.approx(0.5)
    assert rate(0.1) == pytest.approx(1.0)
    assert rate(0.55) == pytest.approx(0.6)
    assert rate(1.0) == pytest.approx(0.2)


@given(progress=st.floats(0, 1), warmup=st.floats(0, 0.99), floor=st.floats(0, 1))
def test_the_factor_stays_between_0_and_1(progress, warmup, floor):
    assert 0.0 <= cosine(progress, warmup=warmup, floor=floor) <= 1.0 + 1e-12


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
