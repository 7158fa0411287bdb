import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.errors import RecipeError
from paceline.target.taps import check_taps, default_taps


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 3, (1, 14, 27)),
        (36, 1, (18,)),
        (30, 2, (1, 27)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_default_taps_of_the_paper(num_layers, num_taps, expected):
    assert default_taps(num_layers, num_taps) == expected


@given(num_layers=st.integers(1, 130), num_taps=st.integers(-1, 40))
def test_default_taps_are_valid_wherever_they_fit(num_layers, num_taps):
    fits = num_layers >= 3 if num_taps == 1 else 2 <= num_taps <= num_layers - 3
    if fits:
        taps = default_taps(num_layers, num_taps)
        check_taps(taps, num_layers)
        assert len(taps) == num_taps
    else:
        with pytest.raises(RecipeError, match=r"extract\.num_taps"):
            default_taps(num_layers, num_taps)


@pytest.mark.parametrize(
    ("taps", "reason"),
    [
        ((), "empty"),
        ((3, 1), "rise"),
        ((1, 1), "rise"),
        ((-1, 2), "beyond"),
        ((2, 8), "beyond"),
        ((2, 7), "last layer"),
    ],
)
def test_impossible_taps_are_refused_with_the_reason(taps, reason):
    with pytest.raises(RecipeError, match=reason):
        check_taps(taps, 8)


def test_taps_up_to_the_last_but_one_pass():
    check_taps((0, 3, 6), 8)
