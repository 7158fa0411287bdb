import dataclasses
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_samples import assert_same, random_features, sample_of
from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import DataError, IntegrityError, ShardDamaged
from paceline.features.manifest import Manifest, UnitEntry, load, publish
from paceline.features.order import windowed_order
from paceline.features.plan import unit_key
from paceline.features.reader import FeatureReader
from paceline.features.shard import write_shard
from paceline.types import LayerConvention

LENGTHS = [[5, 1, 7], [3], [2, 2]]


def build(root, lengths=LENGTHS):
    entries = []
    parts = [random_features(row, seed=n) for n, row in enumerate(lengths)]
    for n, part in enumerate(parts):
        stat = write_shard(root / unit_key(n), part, fingerprint="f" * 32)
        mask = [sample_of(part, i).tokens.loss_mask for i in range(len(part.tokens))]
        entries.append(
            UnitEntry(
                key=unit_key(n),
                size=stat.size,
                crc64=crc64_hex(stat.crc64),
                sample_ids=part.tokens.sample_ids,
                lengths=tuple(part.tokens.lengths),
                loss_tokens=tuple(int(m.sum()) for m in mask),
            )
        )
    manifest = Manifest(
        fingerprint="f" * 32,
        target_identity="t",
        hidden_size=8,
        layer_ids=(1, 3),
        layer_convention=LayerConvention.OUTPUT_AFTER_LAYER,
        last=True,
        dtype="bfloat16",
        units=tuple(entries),
    )
    publish(root, manifest)
    return manifest, [sample_of(p, i) for p in parts for i in range(len(p.tokens))]


def test_samples_are_read_by_number(tmp_path):
    manifest, samples = build(tmp_path)
    reader = FeatureReader(tmp_path)
    assert len(reader) == 6
    assert reader.manifest == manifest
    assert reader.digest == manifest.digest
    assert reader.lengths == (5, 1, 7, 3, 2, 2)
    assert reader.samples_per_shard == (3, 1, 2)
    assert reader.loss_tokens == tuple(int(s.tokens.loss_mask.sum()) for s in samples)
    for index in windowed_order(0, 0, reader.digest, reader.samples_per_shard, 2).tolist():
        found = reader.read(index)
        assert_same(found, samples[index])
        assert found.tokens.sample_ids == (reader.sample_ids[index],)
    for index in (-1, 6):
        with pytest.raises(IndexError, match="of 6"):
            reader.read(index)


def test_few_shards_stay_open_and_all_stay_readable(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.features.reader._OPEN_SHARDS", 1)
    _, samples = build(tmp_path)
    reader = FeatureReader(tmp_path)
    kept = [reader.read(i) for i in (0, 3, 4, 1, 3)]
    for found, index in zip(kept, (0, 3, 4, 1, 3), strict=True):
        assert_same(found, samples[index])


def test_damage_is_found_at_first_touch_and_only_there(tmp_path):
    _, samples = build(tmp_path)
    path = tmp_path / unit_key(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = FeatureReader(tmp_path)
    assert_same(reader.read(0), samples[0])
    assert_same(reader.read(5), samples[5])
    with pytest.raises(ShardDamaged, match=unit_key(1)):
        reader.read(3)


def test_a_whole_shard_that_is_not_the_listed_one_is_refused(tmp_path):
    build(tmp_path)
    write_shard(tmp_path / unit_key(1), random_features([3], seed=9), fingerprint="e" * 32)
    with pytest.raises(ShardDamaged, match="of fingerprint eeee"):
        FeatureReader(tmp_path).read(3)


def test_a_shard_swapped_after_its_first_touch_is_checked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.features.reader._OPEN_SHARDS", 1)
    build(tmp_path)
    reader = FeatureReader(tmp_path)
    reader.read(3)
    reader.read(0)
    write_shard(tmp_path / unit_key(1), random_features([3], seed=9), fingerprint="f" * 32)
    with pytest.raises(ShardDamaged, match="not the one that the manifest lists"):
        reader.read(3)


def test_a_store_without_a_manifest_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="paceline extract"):
        FeatureReader(tmp_path)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_in_the_manifest_is_detected(tmp_path, data):
    source = tmp_path / "made"
    if not source.exists():
        build(source)
    good = (source / "manifest.json").read_bytes()
    bad = bytearray(good)
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    target = tmp_path / "bad"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "manifest.json").write_bytes(bad)
    with pytest.raises(IntegrityError):
        load(target)


def test_another_version_is_refused(tmp_path):
    manifest, _ = build(tmp_path)
    publish(tmp_path, dataclasses.replace(manifest, version=2))
    with pytest.raises(IntegrityError, match="format version 2"):
        load(tmp_path)


def test_the_digest_depends_on_content_and_order(tmp_path):
    manifest, _ = build(tmp_path)
    assert load(tmp_path).digest == manifest.digest
    swapped = dataclasses.replace(manifest, units=manifest.units[::-1])
    other = dataclasses.replace(manifest, units=manifest.units[:-1])
    assert len({manifest.digest, swapped.digest, other.digest}) == 3
