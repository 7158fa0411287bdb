import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extract_runs import make_sample
from extract_units import Units, make_units
from feature_samples import random_features
from paceline.durable.errors import DataError, ShardDamaged, TargetError
from paceline.durable.iowatch import IoWatch
from paceline.durable.store import LocalStore, MemoryStore
from paceline.extract.job import StoredSample, pick_stored
from paceline.extract.recheck import recheck, tolerance
from paceline.extract.worker import open_worker
from paceline.features.plan import plan_units
from paceline.features.shard import Shard, write_shard
from paceline.recipe.schema import TargetRecipe
from paceline.target.capture import CapturePlan
from paceline.target.load import Target, load_target
from paceline.types.sample import encode_sample
from tiny_models import tiny_model

LENGTHS = [40, 1, 30, 17, 20, 20, 6, 33, 12, 9, 50, 3]
THEN = {"source": "aaaa", "torch": "2.12", "machine": "x86_64"}
NOW = {"source": "bbbb", "torch": "2.13", "machine": "x86_64"}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return load_target(TargetRecipe(path=str(target_folder)))


def stored_units(folder: Path, target: Path, **fields) -> Units:
    """Units in `folder / "store"`, and a job that has three of their samples checked."""
    units = make_units(folder, target, LENGTHS, unit_tokens=100, **fields)
    handle = open_worker(units.job, units.context())
    for unit in units.units:
        handle(units.task(unit.index), folder / "store" / unit.key)
    chosen = pick_stored(
        units.units, range(len(units.units)), units.rows.positions, count=3, seed=1
    )
    return units.with_job(
        rechecks=chosen, store=str(folder / "store"), made_with=THEN, software=NOW
    )


def run(target: Target, units: Units, store=None):
    job = units.job
    plan = CapturePlan(job.layer_ids, job.last, job.chunk_tokens, getattr(torch, job.dtype))
    return recheck(target, plan, job, store or LocalStore(Path(job.store)), IoWatch())


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize(("codec", "exact"), [("none", True), ("planes", True), ("int8o", False)])
def test_what_a_worker_has_stored_it_finds_again(
    codec, exact, chunk_tokens, target_folder, tmp_path
):
    units = stored_units(tmp_path, target_folder, codec=codec, chunk_tokens=chunk_tokens)
    made = open_worker(units.job, units.context())(units.task(0), tmp_path / "again")
    assert [found.exact for found in made.info.rechecked] == [exact] * 3
    limit = tolerance(units.job)
    assert all((found.relative_l2 == 0) == exact for found in made.info.rechecked)
    assert all(found.relative_l2 <= limit for found in made.info.rechecked)
    names = {sample.sample_id for sample in units.samples}
    assert {found.sample_id for found in made.info.rechecked} <= names


def test_a_worker_tells_it_once(target_folder, tmp_path):
    units = stored_units(tmp_path, target_folder)
    handle = open_worker(units.job, units.context())
    assert len(handle(units.task(0), tmp_path / "again").info.rechecked) == 3
    assert handle(units.task(0), tmp_path / "again").info.rechecked == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_neighbours_in_the_batch_are_within_the_tolerance(
    dtype, target, target_folder, tmp_path
):
    """As after a change of extract.batch_tokens: the kernels may round otherwise."""
    units = stored_units(tmp_path, target_folder, dtype=dtype)
    alone = tuple(
        replace(stored, positions=(stored.positions[stored.place],), place=0)
        for stored in units.job.rechecks
    )
    found = run(target, units.with_job(rechecks=alone))
    assert all(one.exact or one.relative_l2 <= tolerance(units.job) for one in found)


def test_in_an_object_store_the_shard_is_fetched_and_not_left_behind(
    target, target_folder, tmp_path
):
    units = stored_units(tmp_path, target_folder, scratch=tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    store = MemoryStore()
    for path in (tmp_path / "store").iterdir():
        store.put(path.name, path)
    assert [found.exact for found in run(target, units, store)] == [True] * 3
    assert list((tmp_path / "scratch").iterdir()) == []
    store.delete([units.job.rechecks[0].key])
    with pytest.raises(ShardDamaged, match="is gone"):
        run(target, units, store)


def scaled(target: Target, factor: float):
    """A patch of the engine: one layer's output is a little more than it was."""
    return target.decoder.layers[3].register_forward_hook(
        lambda _module, _args, output: output * factor
    )


def test_a_patched_engine_stops_the_run_and_what_changed_is_named(target, target_folder, tmp_path):
    units = stored_units(tmp_path, target_folder)
    handle = scaled(target, 1.02)
    try:
        with pytest.raises(TargetError) as caught:
            run(target, units)
    finally:
        handle.remove()
    message = str(caught.value)
    first = units.job.rechecks[0]
    assert f"{first.key}, sample " in message
    assert "tap 3 is not what is stored: token " in message
    assert re.search(r"is 0\.02\d* away \(relative L2; 0\.004 is allowed\), \d+ of \d+", message)
    assert f"their identity, {target.spec.identity}" in message
    assert "source was aaaa, now bbbb; torch was 2.12, now 2.13." in message
    assert "machine" not in message
    assert "new run directory (`--run DIR`)" in message


@pytest.mark.parametrize(
    ("made_with", "said"),
    [
        ({}, "what the stored states were made with is not recorded"),
        (NOW, "are as they were: suspect a patch inside an installed package"),
        ({**NOW, "driver": "550"}, "driver was 550, now not recorded"),
    ],
)
def test_the_cause_is_named_as_far_as_it_is_known(made_with, said, target, target_folder, tmp_path):
    units = stored_units(tmp_path, target_folder).with_job(made_with=made_with)
    handle = scaled(target, 1.02)
    try:
        with pytest.raises(TargetError, match=said):
            run(target, units)
    finally:
        handle.remove()


def test_a_state_that_is_no_number_is_a_difference(target, target_folder, tmp_path):
    units = stored_units(tmp_path, target_folder)
    handle = scaled(target, float("nan"))
    try:
        with pytest.raises(TargetError, match="inf away"):
            run(target, units)
    finally:
        handle.remove()


def test_other_token_ids_are_refused_before_states_are_compared(target, target_folder, tmp_path):
    units = stored_units(tmp_path, target_folder)
    other = [make_sample(n, length, seed=0) for n, length in enumerate(LENGTHS)]
    for sample in other:
        sample.input_ids[0] = (sample.input_ids[0] + 1) % 10 + 10 * (sample.input_ids[0] // 10)
    corpus = tmp_path / "other.jsonl"
    corpus.write_bytes(b"".join(map(encode_sample, other)))
    same_places = all(
        len(encode_sample(a)) == len(encode_sample(b))
        for a, b in zip(other, units.samples, strict=True)
    )
    assert same_places
    with pytest.raises(DataError, match=f"{units.job.rechecks[0].key}: its sample .* other"):
        run(target, units.with_job(corpus=corpus))


def test_a_damaged_or_foreign_shard_is_not_taken_for_another_engine(
    target, target_folder, tmp_path
):
    units = stored_units(tmp_path, target_folder)
    with pytest.raises(ShardDamaged, match="made by another extraction"):
        run(target, units.with_job(fingerprint="0" * 32))
    path = tmp_path / "store" / units.job.rechecks[0].key
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ShardDamaged):
        run(target, units)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8o_is_never_further_from_itself_than_is_allowed(dtype, target_folder, tmp_path):
    """Hidden states of the worst kind for it: a group's length in one value."""
    units = make_units(tmp_path, target_folder, [30], codec="int8o", dtype=dtype)
    kind = getattr(torch, dtype)
    features = random_features([200, 40], hidden=128, dtype=kind)
    flat = features.taps.view(-1, 64)
    flat[::2, 5] *= 1000
    flat[1::3] *= 1e-3
    write_shard(tmp_path / "shard", features, fingerprint="", codec="int8o")
    back = Shard(tmp_path / "shard").features
    for ours, theirs in ((back.taps, features.taps), (back.last, features.last)):
        away = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
        assert away.max() <= tolerance(units.job)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    count=st.integers(0, 8),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_samples_are_picked_from_done_units_alone(lengths, count, seed, data):
    units = plan_units(lengths, bytes_per_token=1, shard_bytes=60, batch_tokens=40)
    done = data.draw(st.sets(st.integers(0, len(units) - 1)))
    positions = [1000 + 7 * n for n in range(len(lengths))]
    chosen = pick_stored(units, done, positions, count=count, seed=seed)
    assert chosen == pick_stored(units, done, positions, count=count, seed=seed)
    assert len(chosen) == min(count, sum(units[i].stop - units[i].start for i in done))
    assert len({(stored.key, stored.row) for stored in chosen}) == len(chosen)
    assert len({stored.key for stored in chosen}) == min(count, len(done))
    by_key = {unit.key: unit for unit in units}
    for stored in chosen:
        unit = by_key[stored.key]
        assert unit.index in done
        sample = unit.samples[stored.row]
        assert stored.positions[stored.place] == positions[sample]
        batch = next(batch for batch in unit.batches if sample in batch)
        assert stored.positions == tuple(positions[other] for other in batch)


def test_another_session_looks_at_other_samples():
    units = plan_units([10] * 400, bytes_per_token=1, shard_bytes=100, batch_tokens=40)
    chosen = [
        pick_stored(units, range(len(units)), range(400), count=2, seed=seed) for seed in range(20)
    ]
    looked_at = {(stored.key, stored.row) for picked in chosen for stored in picked}
    assert len(looked_at) > 30
    assert all(isinstance(stored, StoredSample) for picked in chosen for stored in picked)
