"""The rate that a stage shows."""

import pytest

from paceline.watch import progress
from paceline.watch.progress import TokenProgress


@pytest.fixture
def clock(monkeypatch):
    """The seconds that it is, to be set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rate_leaves_out_the_start(clock):
    shown = TokenProgress("train", 10_000, done=2_000)
    assert shown.rate == shown.eta == 0
    clock[0] = 120.0
    shown.update(3_000)
    assert shown.rate == 50  # all that there is to go by
    for second in range(1, 5):
        clock[0] = 120.0 + second
        shown.update(3_000 + 200 * second)
        assert shown.rate == 200
    assert shown.eta == (10_000 - 3_800) / 200


def test_what_brings_nothing_is_no_first_update(clock):
    shown = TokenProgress("train", 10_000)
    for second in (101.0, 105.0):
        clock[0] = second
        shown.update(0)
        assert shown.rate == 0
    clock[0] = 110.0
    shown.update(500)
    shown.update(500)
    assert shown.rate == 50
    clock[0] = 120.0
    shown.update(600)
    assert shown.rate == 10
