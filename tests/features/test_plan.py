import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.features.plan import plan_units, unit_key

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(LENGTHS, st.integers(1, 64), st.integers(1, 20_000), st.integers(1, 1000))
def test_every_sample_is_in_one_unit_and_one_batch(lengths, token, shard, tokens):
    units = plan_units(lengths, bytes_per_token=token, shard_bytes=shard, batch_tokens=tokens)
    assert [u.index for u in units] == list(range(len(units)))
    covered = [sample for unit in units for sample in range(unit.start, unit.stop)]
    assert covered == list(range(len(lengths)))
    for unit in units:
        assert sorted(unit.samples) == list(range(unit.start, unit.stop))
        for batch in unit.batches:
            longest = max(lengths[s] for s in batch)
            assert longest * len(batch) <= tokens or len(batch) == 1


@given(LENGTHS, st.integers(1, 64), st.integers(1, 20_000))
def test_units_are_as_large_as_shard_bytes_allows(lengths, token, shard):
    units = plan_units(lengths, bytes_per_token=token, shard_bytes=shard, batch_tokens=64)
    for unit in units:
        size = token * sum(lengths[unit.start : unit.stop])
        assert size <= shard or unit.stop - unit.start == 1
        if unit.stop < len(lengths):
            assert size + token * lengths[unit.stop] > shard


@given(LENGTHS, st.integers(1, 400), st.integers(1, 400))
def test_rows_of_a_shard_do_not_depend_on_batch_tokens(lengths, one, other):
    plans = [
        plan_units(lengths, bytes_per_token=2, shard_bytes=1000, batch_tokens=tokens)
        for tokens in (one, other)
    ]
    assert [u.samples for u in plans[0]] == [u.samples for u in plans[1]]


def test_an_example_by_hand():
    first, second = plan_units(
        [5, 3, 5, 1, 9], bytes_per_token=10, shard_bytes=150, batch_tokens=10
    )
    assert (first.start, first.stop, first.key) == (0, 4, "unit-000000.safetensors")
    assert first.batches == ((0, 2), (1, 3))
    assert second.batches == ((4,),)


def test_names_sort_like_numbers_and_empty_corpora_have_no_units():
    assert unit_key(123) == "unit-000123.safetensors"
    assert plan_units([], bytes_per_token=1, shard_bytes=1, batch_tokens=1) == ()


def test_samples_without_tokens_are_refused():
    with pytest.raises(ValueError, match="without tokens"):
        plan_units([3, 0], bytes_per_token=1, shard_bytes=1, batch_tokens=1)


def test_plan_and_order_need_no_torch():
    code = (
        "import sys, paceline.features.plan, paceline.features.order;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
