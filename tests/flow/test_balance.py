import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.flow.balance import TELLING, split_devices, starvation

RATES = st.floats(0.01, 1e6)


def test_the_measured_split_of_eight_devices_is_five_and_three():
    assert split_devices(4.3, 6.75, 8) == (5, 3)


@pytest.mark.parametrize(
    ("target", "drafter", "devices", "split"),
    [
        (1.0, 1.0, 2, (1, 1)),
        (1e6, 1.0, 8, (1, 7)),
        (1.0, 1e6, 8, (7, 1)),
        # One target and two drafters do as much as two targets and one drafter.
        (1.0, 1.0, 3, (2, 1)),
        (2.0, 4.0, 8, (5, 3)),
    ],
)
def test_each_side_has_one_and_of_two_equal_splits_the_one_with_fewer_drafters(
    target, drafter, devices, split
):
    assert split_devices(target, drafter, devices) == split


@given(RATES, RATES, st.integers(2, 40), st.sampled_from([1.0, 0.5, 0.01]))
def test_no_other_split_is_faster(target, drafter, devices, captured):
    """An epoch of the targets' tokens, then the drafters alone over what is kept of it."""

    def seconds(n: int) -> float:
        first = captured / min(n * target, (devices - n) * drafter)
        return first + (1 - captured) / ((devices - n) * drafter)

    targets, drafters = split_devices(target, drafter, devices, captured)
    assert targets >= 1 <= drafters
    assert targets + drafters == devices
    least = min(map(seconds, range(1, devices)))
    assert seconds(targets) == pytest.approx(least)


def test_where_later_epochs_are_kept_drafters_are_worth_more():
    assert split_devices(1.0, 1.0, 3) == (2, 1)
    assert split_devices(1.0, 1.0, 3, 1 / 20) == (1, 2)


@pytest.mark.parametrize(("target", "drafter", "devices"), [(0, 1, 4), (1, -1, 4), (1, 1, 1)])
def test_what_cannot_be_split_is_refused(target, drafter, devices):
    with pytest.raises(ValueError, match="split_devices"):
        split_devices(target, drafter, devices)


def test_sides_that_keep_pace_are_not_told():
    just_below = TELLING - 1e-6
    assert starvation(just_below, just_below, targets=5, drafters=3) is None
    assert starvation(0.0, 0.0, targets=1, drafters=1) is None


@pytest.mark.parametrize(
    ("lease", "put", "targets", "drafters", "said"),
    [
        (
            0.38, 0.0, 5, 3,
            "drafters wait 38 % of the time: move one device to the targets",
        ),
        (
            0.0, 0.25, 5, 3,
            "targets wait 25 % of the time: move one device to the drafters",
        ),
        # Two that wait 38 % of their time have the work of more than one.
        (
            0.38, 0.0, 5, 2,
            ("drafters wait 38 % of the time: add a device to train.target_devices, or raise "
            "extract.batch_tokens if its devices have the memory"),
        ),
        (
            0.9, 0.02, 7, 1,
            ("the drafter waits 90 % of the time: add a device to train.target_devices, or raise "
            "extract.batch_tokens if its devices have the memory"),
        ),
        (
            0.0, 0.5, 1, 7,
            ("the target waits 50 % of the time: add a device to train.drafter_devices, or raise "
            "train.micro_batch_tokens if its devices have the memory"),
        ),
    ],
)  # fmt: skip
def test_the_side_that_waits_is_told_with_what_helps(lease, put, targets, drafters, said):
    assert starvation(lease, put, targets=targets, drafters=drafters) == said


def test_sides_that_both_wait_want_a_longer_queue():
    said = starvation(0.2, 0.3, targets=5, drafters=3)
    assert said is not None
    assert "drafters wait 20 % of the time and targets 30 %" in said
    assert said.endswith("raise train.queue_bytes")


@given(RATES, st.floats(0.0, 1.0), st.integers(1, 8), st.integers(1, 8))
def test_a_move_is_told_where_it_makes_the_training_faster_and_nowhere_else(rate, share, t, d):
    """Drafters that wait a share of their time are slower together by that share."""
    drafter = t * rate / (d * (1 - share)) if share < 1 else 1e12
    before = t * rate
    after = min((t + 1) * rate, (d - 1) * drafter)
    assume(abs(after - before) > 1e-6 * before)
    assume(share >= TELLING)
    said = starvation(share, 0.0, targets=t, drafters=d)
    assert said is not None
    assert ("move one device" in said) == (after > before)
