import logging
import multiprocessing
import os
import threading
import time

import pytest

from feature_samples import assert_same
from feature_stores import FINGERPRINT, published
from paceline.durable.errors import Interrupted, ShardDamaged, StoreFailed, UserError
from paceline.durable.faulty import Fault, FaultyStore
from paceline.durable.fs import RealFileSystem
from paceline.durable.store import LocalStore, MemoryStore
from paceline.features import cache as caches
from paceline.features.cache import ShardCache
from paceline.features.plan import unit_key
from paceline.features.reader import FeatureReader

LENGTHS = [[5, 1, 7], [3], [2, 2], [9, 9]]


class Watched:
    """A store that counts what is fetched, and can be told to fail or to be slow."""

    def __init__(self, inner):
        self.inner = inner
        self.url = "s3://bucket/features"
        self.fetched = []
        self.failures = 0
        self.transient = True
        self.pause = 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_range(self, key, start, end):
        if self.failures:
            self.failures -= 1
            raise StoreFailed(f"{self.url}: get_range {key}: no answer.", self.transient)
        time.sleep(self.pause)
        self.fetched.append(key)
        return self.inner.get_range(key, start, end)


@pytest.fixture
def store():
    return Watched(MemoryStore())


@pytest.fixture
def made(tmp_path, store):
    return published(tmp_path / "run" / "features", LENGTHS, store=store, codec="planes")


def reader_of(tmp_path, store, **options):
    return FeatureReader(tmp_path / "run" / "features", store=store, **options)


def copies(tmp_path):
    return sorted(p.name for p in (tmp_path / "run" / "cache").rglob("*.safetensors"))


def test_each_shard_is_fetched_once_and_read_from_its_copy(tmp_path, store, made):
    manifest, samples = made
    reader = reader_of(tmp_path, store)
    for _ in range(2):
        for index, wanted in enumerate(samples):
            assert_same(reader.read(index), wanted)
    again = reader_of(tmp_path, store)
    assert_same(again.read(3), samples[3])
    assert sorted(store.fetched) == [unit.key for unit in manifest.units]
    assert copies(tmp_path) == [unit.key for unit in manifest.units]
    assert reader.num_bytes == sum(unit.size for unit in manifest.units)
    free = os.statvfs(tmp_path)
    assert 0 < reader.cache_limit <= free.f_frsize * free.f_blocks


def test_a_shard_is_fetched_in_parts(tmp_path, store, made, monkeypatch):
    monkeypatch.setattr(caches, "_PART", 100)
    _, samples = made
    assert_same(reader_of(tmp_path, store).read(3), samples[3])
    assert len(store.fetched) > 5


def test_copies_stay_within_their_bytes_and_the_longest_unused_goes(tmp_path, store, made):
    manifest, samples = made
    sizes = [unit.size for unit in manifest.units]
    limit = sizes[0] + sizes[1] + sizes[2]
    reader = reader_of(tmp_path, store, cache_bytes=limit)
    kept = [reader.read(0), reader.read(3), reader.read(4)]
    assert copies(tmp_path) == [unit_key(n) for n in (0, 1, 2)]
    for index in (4, 0):
        time.sleep(0.02)
        reader.read(index)
    fourth = reader.read(6)
    assert copies(tmp_path)[-1] == unit_key(3)
    assert unit_key(1) not in copies(tmp_path), "it was used longest ago"
    assert unit_key(0) in copies(tmp_path), "it was used last"
    total = sum(p.stat().st_size for p in (tmp_path / "run" / "cache").rglob("*.safetensors"))
    assert total <= limit
    for found, index in zip((*kept, fourth), (0, 3, 4, 6), strict=True):
        assert_same(found, samples[index])
    held = {reader.manifest.units[u].key for u in reader._open}
    assert unit_key(1) not in held, "an open map would keep its bytes on the disk"
    assert_same(reader.read(3), samples[3])


def test_a_limit_below_one_shard_says_which_key_to_raise(tmp_path, store, made):
    reader = reader_of(tmp_path, store, cache_bytes=100)
    with pytest.raises(UserError, match=r"train\.cache_bytes: 100 bytes are less than one shard"):
        reader.read(0)
    assert store.fetched == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_copy_that_is_not_the_object_is_fetched_again(tmp_path, store, made, damage, caplog):
    _, samples = made
    reader_of(tmp_path, store).read(3)
    path = tmp_path / "run" / "cache" / FINGERPRINT / unit_key(1)
    data = path.read_bytes()
    other = store.inner.get_range(unit_key(2), 0, made[0].units[2].size)
    path.write_bytes(
        {
            "flip": data[:-1] + bytes([data[-1] ^ 1]),
            "cut": data[:-5],
            "empty": b"",
            "foreign": other,
        }[damage]
    )
    assert_same(reader_of(tmp_path, store).read(3), samples[3])
    assert store.fetched.count(unit_key(1)) == 2
    assert "fetched again" in caplog.text
    assert path.read_bytes() == data


class Rotten(RealFileSystem):
    """A disk that keeps other bytes than it was given."""

    def write(self, file, data):
        super().write(file, bytes(len(data)))


def test_a_disk_that_keeps_other_bytes_is_named(tmp_path, store, made):
    reader = reader_of(tmp_path, store)
    reader._files._fs = Rotten()
    with pytest.raises(ShardDamaged, match="Look at the disk"):
        reader.read(3)


def test_t_50_an_object_that_is_another_one_is_refused(tmp_path, store, made):
    manifest, _ = made
    data = store.inner.get_range(unit_key(1), 0, manifest.units[1].size)
    reader = reader_of(tmp_path, store)
    bad = {"changed": data[:-1] + b"x", "longer": data + b"x", "shorter": data[:-1], "empty": b""}
    for name, content in bad.items():
        store.inner.put(unit_key(1), content)
        if name == "longer":
            assert len(reader.read(3).tokens) == 1, "its first bytes are the object"
            reader._open.clear()
            reader._files.drop(unit_key(1))
            continue
        with pytest.raises(ShardDamaged, match=rf"features/{unit_key(1)} is (not|shorter)"):
            reader.read(3)
    store.inner.delete([unit_key(1)])
    with pytest.raises(ShardDamaged, match="is gone from the store"):
        reader.read(3)
    assert copies(tmp_path) == []


def test_errors_that_pass_are_waited_for_and_told(tmp_path, store, made, caplog, monkeypatch):
    monkeypatch.setattr(caches.time, "sleep", lambda _: None)
    _, samples = made
    store.failures = 5
    assert_same(reader_of(tmp_path, store).read(3), samples[3])
    told = [r for r in caplog.records if "no answer" in r.message]
    assert len(told) == 1, "told once, not at every try"
    assert told[0].levelno == logging.WARNING


def test_a_store_that_stays_away_or_says_no_ends_the_read(tmp_path, store, made):
    store.failures = 10**6
    files = ShardCache(tmp_path / "c", store, "x", patience=0.1)
    with pytest.raises(StoreFailed):
        files.fetch(made[0].units[0])
    store.failures, store.transient = 1, False
    with pytest.raises(StoreFailed):
        files.fetch(made[0].units[0])
    assert store.failures == 0
    assert [p for p in (tmp_path / "c").rglob("*.*") if p.name != "cache.lock"] == []


@pytest.mark.parametrize("held", [False, True], ids=["the store", "another reader's fetch"])
def test_a_fetch_that_is_no_longer_wanted_ends_at_once(tmp_path, store, made, held):
    """Whatever it waits for. Its threads keep no process from ending."""
    unit = made[0].units[0]
    unwanted, asked, answer = (threading.Event() for _ in range(3))

    def silent(*arguments):
        asked.set()
        answer.wait()
        return store.inner.get_range(*arguments)

    store.get_range = silent
    others = []
    if held:
        other = ShardCache(tmp_path / "c", store, "x")
        others = [threading.Thread(target=other.fetch, args=(unit,))]
        others[0].start()
        assert asked.wait(5)
    files = ShardCache(tmp_path / "c", store, "x", unwanted=unwanted.is_set)
    threading.Timer(0.3, unwanted.set).start()
    started = time.monotonic()
    with pytest.raises(Interrupted, match="was given up"):
        files.fetch(unit)
    assert time.monotonic() - started < 5
    fetching = [thread for thread in threading.enumerate() if thread.name == "fetch"]
    assert fetching
    assert all(thread.daemon for thread in fetching)
    answer.set()
    for thread in (*others, *fetching):
        thread.join()
    assert not list((tmp_path / "c").rglob("*.fetch"))


def test_seeded_faults_never_give_other_bytes(tmp_path, made, store, monkeypatch):
    monkeypatch.setattr(caches.time, "sleep", lambda _: None)
    monkeypatch.setattr(caches, "_PART", 300)
    _, samples = made
    faulty = FaultyStore(
        store.inner, seed=3, faults={Fault.ERROR_BEFORE: 0.2, Fault.ERROR_AFTER: 0.2}
    )
    reader = reader_of(tmp_path, faulty)
    for index, wanted in enumerate(samples):
        assert_same(reader.read(index), wanted)
    assert faulty.injected.total() > 3


def test_two_readers_of_one_process_share_a_fetch(tmp_path, store, made):
    _, samples = made
    store.pause = 0.3
    readers = [reader_of(tmp_path, store) for _ in range(3)]
    found = {}
    threads = [
        threading.Thread(target=lambda n=n, r=r: found.update({n: r.read(3)}))
        for n, r in enumerate(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for features in found.values():
        assert_same(features, samples[3])
    assert store.fetched == [unit_key(1)]
    assert copies(tmp_path) == [unit_key(1)]


def _read_all(root, folder, limit, seed, failed):
    reader = FeatureReader(root, store=Watched(LocalStore(folder)), cache_bytes=limit)
    try:
        for n in range(60):
            index = (n * 5 + seed) % len(reader)
            assert reader.read(index).tokens.sample_ids == (reader.sample_ids[index],)
    except BaseException:
        failed.set()
        raise


def test_two_processes_share_copies_that_do_not_all_fit(tmp_path):
    """Each removes what the other has just fetched, and both read on."""
    root, folder = tmp_path / "run" / "features", tmp_path / "far"
    manifest, _ = published(root, LENGTHS, store=Watched(LocalStore(folder)))
    sizes = sorted(unit.size for unit in manifest.units)
    context = multiprocessing.get_context("fork")
    failed = context.Event()
    limit = sizes[-1] + sizes[-2]
    workers = [
        context.Process(target=_read_all, args=(root, folder, limit, seed, failed))
        for seed in (0, 2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failed.is_set()
    assert [worker.exitcode for worker in workers] == [0, 0]
    left = [p for p in (tmp_path / "run" / "cache").rglob("*.*") if p.name != "cache.lock"]
    assert sum(p.stat().st_size for p in left) <= limit
    assert all(p.suffix == ".safetensors" for p in left)


def test_what_a_killed_reader_left_is_taken_over_or_removed(tmp_path, store, made):
    manifest, samples = made
    folder = tmp_path / "run" / "cache" / FINGERPRINT
    folder.mkdir(parents=True)
    own, other = (f"{u.key}.{u.size}.fetch" for u in manifest.units[1:3])
    for name in (own, other):
        (folder / name).write_bytes(b"half")
    reader = reader_of(tmp_path, store, cache_bytes=manifest.units[1].size)
    assert_same(reader.read(3), samples[3])
    assert [p.name for p in folder.iterdir()] == [unit_key(1)]


def test_a_fetch_that_is_under_way_is_not_removed(tmp_path, store, made):
    manifest, _ = made
    sizes = [unit.size for unit in manifest.units]
    store.pause = 0.4
    files = ShardCache(tmp_path / "c", store, "x", limit=max(sizes))
    thread = threading.Thread(target=files.fetch, args=(manifest.units[0],))
    thread.start()
    time.sleep(0.15)
    files.fetch(manifest.units[3])
    thread.join()
    assert files.path(unit_key(0)).exists()
    assert files.path(unit_key(3)).exists()


class Full(RealFileSystem):
    def write(self, file, data):
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_nothing_behind(tmp_path, store, made):
    files = ShardCache(tmp_path / "c", store, "x", limit=1 << 20, fs=Full())
    with pytest.raises(OSError, match="No space"):
        files.fetch(made[0].units[0])
    assert [p.name for p in (tmp_path / "c").rglob("*") if p.is_file()] == ["cache.lock"]
