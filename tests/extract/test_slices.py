"""Units of an extraction, divided over machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.errors import UserError
from paceline.extract.slices import ALL, Slice, parse_slice


@given(count=st.integers(1, 40), unit=st.integers(0, 10_000))
def test_each_unit_is_of_exactly_one_slice(count, unit):
    slices = [parse_slice(f"{n}/{count}") for n in range(1, count + 1)]
    assert sum(s.holds(unit) for s in slices) == 1


def test_without_slices_one_machine_does_all():
    assert all(ALL.holds(unit) for unit in range(100))
    assert parse_slice("1/1") == ALL
    assert str(Slice(2, 4)) == "2/4"


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1/0", "a/b", "-1/4", "1", "1/2/3", "1.0/2"])
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match="such as 1/4"):
        parse_slice(text)
