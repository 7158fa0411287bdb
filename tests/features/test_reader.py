import pytest

from feature_samples import assert_same, random_features
from feature_stores import published
from paceline.durable.errors import DataError, ShardDamaged
from paceline.durable.store import LocalStore
from paceline.features.order import windowed_order
from paceline.features.plan import unit_key
from paceline.features.reader import FeatureReader
from paceline.features.shard import write_shard

LENGTHS = [[5, 1, 7], [3], [2, 2]]


def build(root):
    return published(root, LENGTHS)


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


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_a_reader_cannot_tell_a_lossless_codec(tmp_path, codec):
    _, samples = published(tmp_path, LENGTHS, codec=codec)
    reader = FeatureReader(tmp_path)
    for index, wanted in enumerate(samples):
        assert_same(reader.read(index), wanted)


def test_shards_may_lie_in_another_folder_and_are_read_there(tmp_path):
    shards = LocalStore(tmp_path / "far" / "away")
    _, samples = published(tmp_path / "run", LENGTHS, store=shards)
    reader = FeatureReader(tmp_path / "run")
    assert reader.manifest.store == shards.url
    assert reader.cache_limit is None
    for index, wanted in enumerate(samples):
        assert_same(reader.read(index), wanted)
    assert not (tmp_path / "cache").exists()
