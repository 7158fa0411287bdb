import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.features.order import order, windowed_order

SEEDS = st.integers(0, 2**40)


@given(SEEDS, st.integers(0, 100), st.text("0123456789abcdef", max_size=32), st.integers(0, 500))
def test_a_permutation_and_a_pure_function(seed, epoch, digest, n):
    first = order(seed, epoch, digest, n)
    assert sorted(first.tolist()) == list(range(n))
    assert first.tolist() == order(seed, epoch, digest, n).tolist()


def test_the_order_of_this_release_is_the_order_of_every_release():
    assert order(7, 1, "abc", 10).tolist() == [7, 1, 3, 6, 8, 5, 0, 4, 2, 9]
    assert order(7, 1, "abc", 10).dtype == np.int64


def test_seed_epoch_and_manifest_each_change_it():
    base = order(0, 0, "m", 200).tolist()
    for other in (order(1, 0, "m", 200), order(0, 1, "m", 200), order(0, 0, "n", 200)):
        assert other.tolist() != base
    assert order(1, 11, "m", 99).tolist() != order(11, 1, "m", 99).tolist()


def test_positions_are_uniform():
    n, epochs = 8, 4000
    first = np.bincount([order(0, e, "m", n)[0] for e in range(epochs)], minlength=n)
    expected = epochs / n
    assert ((first - expected) ** 2 / expected).sum() < 29.9, "chi-square, 7 degrees, p = 1e-4"


@given(SEEDS, st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 8))
def test_windows_hold_few_shards_at_a_time(seed, counts, window):
    found = windowed_order(seed, 3, "m", counts, window)
    assert sorted(found.tolist()) == list(range(sum(counts)))
    shard_of = np.repeat(np.arange(len(counts)), counts)[found]
    at = 0
    seen: set[int] = set()
    while at < len(found):
        inside: list[int] = []
        while at < len(found) and (shard_of[at] in inside or len(inside) < window):
            if shard_of[at] not in inside:
                inside.append(int(shard_of[at]))
            at += 1
        assert not seen & set(inside), "a shard came back after its window"
        seen |= set(inside)


def test_windows_shuffle_shards_and_mix_their_samples():
    counts = [10] * 12
    orders = [windowed_order(0, epoch, "m", counts, 3).tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1]
    shards = [i // 10 for i in orders[0][:30]]
    assert len(set(shards)) == 3
    assert shards != sorted(shards)
    with pytest.raises(ValueError, match="window 0"):
        windowed_order(0, 0, "m", counts, 0)
