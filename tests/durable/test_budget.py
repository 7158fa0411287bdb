import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.budget import Budget, check_budget
from paceline.durable.errors import RecipeError
from torture_commit import BackPressure, Build, UnboundedBudget, back_pressure

MIB = 1 << 20


def test_bytes_are_reserved_settled_and_released():
    budget = Budget(10)
    assert budget.try_reserve("a", 6)
    assert not budget.try_reserve("b", 5)
    assert budget.held == 6
    budget.settle("a", 4)
    assert budget.try_reserve("b", 5)
    assert (budget.held, budget.peak, budget.limit) == (9, 9, 10)
    budget.release("a")
    budget.release("a")
    budget.release("never")
    assert (budget.held, budget.peak) == (5, 9)


def test_what_cannot_be_is_refused_loudly():
    with pytest.raises(ValueError, match="budget of 0"):
        Budget(0)
    budget = Budget(10)
    for size in (11, -1):
        with pytest.raises(ValueError, match="of a budget of 10"):
            budget.try_reserve("a", size)
    budget.try_reserve("a", 5)
    with pytest.raises(ValueError, match="already"):
        budget.try_reserve("a", 1)
    assert budget.held == 5


def test_more_than_was_reserved_is_held_even_beyond_the_limit_and_warned_of_once(caplog):
    budget = Budget(10)
    assert budget.try_reserve("a", 5)
    assert budget.try_reserve("b", 5)
    budget.settle("a", 6000)
    budget.settle("b", 6)
    assert (budget.held, budget.peak) == (6006, 6006)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "a takes 6,000 bytes, and 5 were reserved for it" in warning.getMessage()
    assert not budget.try_reserve("c", 0)
    budget.release("a")
    assert budget.try_reserve("c", 4)
    budget.release("b")
    budget.release("c")
    assert budget.held == 0


def test_what_lies_there_already_counts_even_beyond_the_limit():
    budget = Budget(10)
    budget.adopt("old", 15)
    assert not budget.try_reserve("a", 0)
    budget.release("old")
    assert budget.try_reserve("a", 10)


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50))),
)
def test_never_more_than_the_limit_and_nothing_leaks(limit, steps):
    budget, sizes = Budget(limit), {}
    for owner, size, real in steps:
        name = str(owner)
        if name in sizes:
            budget.settle(name, min(real, sizes[name]))
            budget.release(name)
            del sizes[name]
        elif size <= limit:
            fits = sum(sizes.values()) + size <= limit
            assert budget.try_reserve(name, size) is fits
            if fits:
                sizes[name] = size
        assert budget.held == sum(sizes.values()) <= budget.peak <= limit
    for name in sizes:
        budget.release(name)
    assert budget.held == 0


def test_threads_share_one_budget():
    budget = Budget(100)

    def work(name: str) -> None:
        for _ in range(2000):
            if budget.try_reserve(name, 30):
                budget.settle(name, 20)
                budget.release(name)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.held == 0
    assert budget.peak <= 100


def test_t_46_a_budget_below_the_largest_unit_names_the_smallest_that_works():
    check_budget(4 * MIB, [MIB] * 100)
    check_budget(4 * MIB, [4 * MIB])
    check_budget(1, [])
    with pytest.raises(RecipeError, match=r"extract\.staging_bytes at least 5242880"):
        check_budget(4 * MIB, [MIB, 5 * MIB, 2 * MIB])


def test_t_46_staging_of_4_mib_units_of_1_mib_and_a_slow_uploader(tmp_path: Path):
    found = back_pressure(
        tmp_path, budget=4 * MIB, unit_bytes=MIB, units=100, bytes_per_second=100 * MIB
    )
    assert 3 * MIB <= found.peak <= 4 * MIB
    assert found.held_peak <= 4 * MIB
    assert found.false_dones == []


def slow(folder: Path, build: Build | None = None) -> BackPressure:
    return back_pressure(
        folder,
        budget=2_000_000,
        unit_bytes=160_000,
        units=60,
        bytes_per_second=6_400_000,
        build=build or Build(),
    )


def test_back_pressure_the_budget_holds_and_the_uploads_are_never_idle(tmp_path):
    found = slow(tmp_path)
    print(found)
    assert found.peak <= 2_000_000
    assert found.false_dones == []
    assert found.ideal <= found.seconds < 1.3 * found.ideal
    assert found.stalled > 0.3 * found.seconds
    assert "the upload is the bottleneck" in found.advice[0]
    assert "a larger `extract.staging_bytes` would not help" in found.advice[0]


def test_sabotage_without_reservation_is_found_by_back_pressure(tmp_path):
    assert slow(tmp_path, Build(budget=UnboundedBudget)).peak > 2_000_000
