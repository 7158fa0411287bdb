import logging
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_samples import assert_same, random_features
from feature_stores import published
from paceline.durable.object_store import ObjectStore
from paceline.durable.store import MemoryStore
from paceline.features.reader import FeatureReader
from paceline.flow.channel import Channel, Lease
from paceline.flow.signals import Stop
from paceline.recipe.schema import TrainRecipe
from paceline.recipe.training import training_fields
from paceline.train.agenda import Agenda
from paceline.train.fed import Fed
from paceline.train.source import (
    Feed,
    StoredFeatures,
    cache_warnings,
    stored_features,
    training_samples_per_shard,
)
from training_runs import schedule


def epochs(indices, **options):
    n = len(indices)
    return [
        list(schedule(indices, "d", seed=3, first=n * e, end=n * (e + 1), **options))
        for e in range(3)
    ]


@given(
    per_shard=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    held=st.sets(st.integers(0, 99)),
    window=st.integers(1, 5),
)
def test_a_windowed_epoch_has_every_sample_once_from_few_shards_at_a_time(per_shard, held, window):
    total = sum(per_shard)
    indices = tuple(i for i in range(total) if i not in held) or (0,)
    shards = training_samples_per_shard(indices, per_shard)
    shard_of = np.repeat(np.arange(len(per_shard)), per_shard)
    assert shards == tuple(int((shard_of[list(indices)] == s).sum()) for s in range(len(shards)))
    for found in epochs(indices, shards=shards, window=window):
        assert sorted(found) == list(indices)
        open_at_once = max(
            len({int(shard_of[i]) for i in found[:p]} & {int(shard_of[i]) for i in found[p:]})
            for p in range(len(found))
        )
        assert open_at_once <= window


def test_a_position_in_a_windowed_order_is_all_that_a_resume_needs():
    indices, shards = tuple(range(30)), (10, 10, 10)
    whole = list(schedule(indices, "d", seed=1, first=0, end=75, shards=shards, window=2))
    later = list(schedule(indices, "d", seed=1, first=41, end=75, shards=shards, window=2))
    assert whole[41:] == later
    assert whole[:30] != whole[30:60]
    assert whole != list(schedule(indices, "d", seed=1, first=0, end=75))


def test_checkpoints_from_before_the_key_go_on():
    """Their fields have no window; null has to be the same training."""
    assert "shard_window" not in training_fields(TrainRecipe())
    assert training_fields(TrainRecipe(shard_window=4))["shard_window"] == 4
    assert "cache_bytes" not in training_fields(TrainRecipe(cache_bytes=1))


def test_a_step_whose_features_exceed_the_queue_is_taken_whole():
    """A drafter gives nothing back before it has answered the step."""
    samples = [random_features([8], seed=n) for n in range(5)]
    channel: Channel[Fed] = Channel(2 * samples[0].num_bytes)
    agenda = Agenda(consumed=0, owed=(), end=len(samples))
    taken: list[Lease[Fed]] = []

    def fill() -> None:
        for features in samples:
            position = agenda.take()
            assert position is not None
            channel.put(Fed(position, features), features.tokens.sample_ids, features.num_bytes)

    def take() -> None:
        taken.extend(Feed(channel, agenda, Stop()).take(len(samples)))

    threads = [threading.Thread(target=work, daemon=True) for work in (fill, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert [lease.item.position for lease in taken] == [0, 1, 2, 3, 4]


def reader_with(tmp_path, **options):
    root = tmp_path / "run" / "features"
    store = MemoryStore()
    published(root, [[8]] * 6, store=store)
    return FeatureReader(root, store=store, **options)


def test_copies_that_cannot_hold_the_order_are_told_with_the_fix(tmp_path):
    reader = reader_with(tmp_path, cache_bytes=1 << 20)
    assert list(cache_warnings(reader, None)) == []
    largest = max(unit.size for unit in reader.manifest.units)
    cramped = reader_with(tmp_path, cache_bytes=4 * largest)
    (said,) = cache_warnings(cramped, None)
    assert "Set train.shard_window to 3 or less, or raise train.cache_bytes." in said
    assert list(cache_warnings(cramped, 3)) == []
    (said,) = cache_warnings(cramped, 4)
    assert said.startswith("train.shard_window: 4 shards of up to")
    assert "Lower it to 3" in said


def test_folders_need_no_copies_and_no_warning(tmp_path):
    published(tmp_path, [[8]] * 6)
    assert list(cache_warnings(FeatureReader(tmp_path), None)) == []


def test_features_of_a_real_object_store_come_through_the_channel(tmp_path, s3, caplog):
    """The store is the one that the manifest names; credentials come from the environment."""
    root = tmp_path / "run" / "features"
    with s3.credentials():
        store = ObjectStore(s3.url("trained"), s3.options)
        manifest, samples = published(root, [[5, 1], [3], [9, 2]], store=store, codec="planes")
        assert manifest.store.startswith("s3://")
        largest = max(unit.size for unit in manifest.units)
        stored = StoredFeatures(
            root=root, options=s3.options, cache=tmp_path / "copies", cache_bytes=2 * largest
        )
        order = [4, 0, 2, 1, 3, 0]
        agenda = Agenda(consumed=0, owed=(), end=len(order))
        filled = stored_features(stored, agenda, order.__getitem__, 1 << 20)
        with caplog.at_level(logging.WARNING), filled as channel:
            for place, index in enumerate(order):
                with channel.lease() as lease:
                    assert lease.item.position == place
                    assert_same(lease.item.features, samples[index])
    copies = list((tmp_path / "copies").rglob("*.safetensors"))
    assert sum(p.stat().st_size for p in copies) <= 2 * largest
    assert caplog.text == ""
