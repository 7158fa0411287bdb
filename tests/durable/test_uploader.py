import random
import threading
import time
from pathlib import Path

import pytest

from paceline.durable.checksum import crc64
from paceline.durable.errors import IntegrityError, StoreFailed
from paceline.durable.faulty import Fault, FaultyStore
from paceline.durable.store import LocalStore, MemoryStore, Stat
from paceline.durable.thread_times import named_threads_seconds
from paceline.durable.uploader import Uploaded, Uploader, UploadFailed
from small_disks import small_disk
from torture_commit import BlindUploader, Build, store_faults


def staged(folder: Path, count: int, size: int = 3000) -> dict[str, tuple[Path, Stat]]:
    files = {}
    for n in range(count):
        path = folder / f"unit-{n}"
        data = random.Random(n).randbytes(size + n)
        path.write_bytes(data)
        files[path.name] = (path, Stat(len(data), crc64(data)))
    return files


def ends(uploader: Uploader, count: int, seconds: float = 20.0) -> list[Uploaded | UploadFailed]:
    found, deadline = [], time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ended"
        found += uploader.poll()
        time.sleep(0.001)
    return found


def uploader_of(store, **options) -> Uploader:
    return Uploader(store, **{"concurrency": 2, "first_pause": 0.001, **options})


def test_what_is_submitted_is_in_the_store_and_told(tmp_path):
    store, news = MemoryStore(), threading.Semaphore(0)
    files = staged(tmp_path, 20)
    uploader = uploader_of(store, wake=news.release)
    for key, (path, stat) in files.items():
        uploader.submit(key, path, stat)
    for _ in files:
        assert news.acquire(timeout=10), "not woken"
    found = {u.key: u.stat for u in uploader.poll() if isinstance(u, Uploaded)}
    assert found == {key: stat for key, (_, stat) in files.items()}
    assert uploader.poll() == []
    assert all(store.head(key) == stat for key, (_, stat) in files.items())
    assert all(path.exists() for path, _ in files.values()), "the file is the caller's"
    assert uploader.bytes_done == sum(stat.size for _, stat in files.values())
    assert (uploader.in_flight, uploader.backlog_bytes, uploader.retries) == (0, 0, 0)
    assert uploader.last_error is None
    uploader.close()
    with pytest.raises(RuntimeError, match="closed"):
        uploader.submit("x", tmp_path / "x", Stat(0, 0))


class Gate(MemoryStore):
    """Holds every put until it is opened; counts those at a time."""

    def __init__(self):
        super().__init__()
        self.opened, self.lock, self.now, self.most = threading.Event(), threading.Lock(), 0, 0

    def put(self, key, source, crc64=None):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.opened.wait(10)
        with self.lock:
            self.now -= 1
        return super().put(key, source, crc64)


def test_the_pool_is_bounded_and_its_backlog_is_counted(tmp_path):
    store = Gate()
    files = staged(tmp_path, 12)
    before = threading.active_count()
    uploader = uploader_of(store, concurrency=3)
    for key, (path, stat) in files.items():
        uploader.submit(key, path, stat)
    while uploader.in_flight < 3:
        time.sleep(0.001)
    assert threading.active_count() <= before + 3
    assert uploader.backlog_bytes == sum(stat.size for _, stat in files.values())
    longest = uploader.longest()
    assert longest is not None
    assert longest[0] == "unit-0"
    store.opened.set()
    ends(uploader, 12)
    assert store.most == 3
    assert uploader.longest() is None
    uploader.close()


def test_errors_that_pass_are_tried_again_and_told_meanwhile(tmp_path):
    first_three = FaultyStore(
        MemoryStore(),
        faults=lambda op, _, n: Fault.ERROR_BEFORE if op == "put" and n <= 3 else None,
    )
    uploader = uploader_of(first_three, first_pause=0.05)
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    while uploader.last_error is None:
        time.sleep(0.001)
    assert "put unit-0" in uploader.last_error
    assert ends(uploader, 1) == [Uploaded(key, stat)]
    assert uploader.retries == 3
    assert uploader.last_error is None
    uploader.close()


def test_a_lost_answer_is_not_uploaded_twice(tmp_path):
    store = FaultyStore(
        MemoryStore(),
        faults=lambda op, _, n: Fault.ERROR_AFTER if op == "put" and n == 1 else None,
    )
    uploader = uploader_of(store)
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    assert ends(uploader, 1) == [Uploaded(key, stat)]
    assert store._calls["put", key] == 1
    uploader.submit(key, path, stat, may_be_there=True)
    ends(uploader, 1)
    assert store._calls["put", key] == 1
    uploader.close()


def test_a_store_that_stays_away_is_given_up_with_its_own_words(tmp_path):
    store = FaultyStore(MemoryStore(), faults={Fault.ERROR_BEFORE: 1.0})
    uploader = uploader_of(store, give_up=0.05)
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    (failed,) = ends(uploader, 1)
    assert isinstance(failed, UploadFailed)
    assert isinstance(failed.error, StoreFailed)
    assert uploader.retries > 1
    uploader.close()


class Refusing(MemoryStore):
    def __init__(self, error):
        super().__init__()
        self.error, self.puts = error, 0

    def put(self, key, source, crc64=None):
        self.puts += 1
        raise self.error


@pytest.mark.parametrize(
    "error",
    [StoreFailed("403: no right to put", transient=False), PermissionError(13, "no"), ValueError()],
)
def test_what_no_waiting_mends_is_told_at_once(tmp_path, error):
    store = Refusing(error)
    uploader = uploader_of(store)
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    assert ends(uploader, 1) == [UploadFailed(key, error)]
    assert store.puts == 1
    uploader.close()


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.EMPTY])
def test_t_50_an_object_that_is_not_what_was_put_is_put_again(tmp_path, fault):
    inner = MemoryStore()
    store = FaultyStore(inner, faults=lambda op, _, n: fault if op == "put" and n <= 2 else None)
    uploader = uploader_of(store)
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    assert ends(uploader, 1) == [Uploaded(key, stat)]
    assert inner.head(key) == stat
    uploader.close()


def test_t_50_a_store_that_keeps_other_bytes_for_good_is_the_stores_fault(tmp_path):
    uploader = uploader_of(FaultyStore(MemoryStore(), faults={Fault.TRUNCATED: 1.0}))
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    uploader.submit(key, path, stat)
    (failed,) = ends(uploader, 1)
    assert isinstance(failed, UploadFailed)
    assert isinstance(failed.error, StoreFailed)
    assert not failed.error.transient
    assert "3000 bytes" in str(failed.error)
    assert "the store has 1500 bytes" in str(failed.error)
    uploader.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_staged_file_that_is_damaged_is_never_tried_again(tmp_path, damage):
    ((key, (path, stat)),) = staged(tmp_path, 1).items()
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[7] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    for store in (MemoryStore(), LocalStore(tmp_path / "store")):
        uploader = uploader_of(store)
        uploader.submit(key, path, stat)
        (failed,) = ends(uploader, 1)
        assert isinstance(failed, UploadFailed)
        assert isinstance(failed.error, IntegrityError)
        assert str(path) in str(failed.error)
        assert store.head(key) is None
        assert uploader.retries == 0
        uploader.close()


def test_a_store_on_a_full_disk_is_waited_for(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(900_000))
        uploader = uploader_of(LocalStore(disk / "store"))
        ((key, (path, stat)),) = staged(tmp_path, 1, size=400_000).items()
        uploader.submit(key, path, stat)
        while uploader.last_error is None:
            time.sleep(0.001)
        assert "No space left" in uploader.last_error
        ballast.unlink()
        assert ends(uploader, 1) == [Uploaded(key, stat)]
        uploader.close()


def test_closing_waits_for_everything_or_drops_what_has_not_begun(tmp_path):
    files = staged(tmp_path, 8)
    for wait in (True, False):
        store = FaultyStore(MemoryStore(), faults={Fault.STALL: 1.0}, stall_seconds=0.02)
        uploader = uploader_of(store)
        for key, (path, stat) in files.items():
            uploader.submit(key, path, stat)
        uploader.close(wait=wait)
        ended = uploader.poll()
        assert len(ended) == 8 if wait else len(ended) <= 4
        assert uploader.backlog_bytes == 0


def test_closing_ends_pauses_and_does_not_wait_for_what_hangs(tmp_path):
    files = staged(tmp_path, 2)
    gate = Gate()
    hanging = uploader_of(gate)
    pausing = uploader_of(Refusing(StoreFailed("503", transient=True)), first_pause=60.0)
    for key, (path, stat) in files.items():
        hanging.submit(key, path, stat)
        pausing.submit(key, path, stat)
    while pausing.retries < 2 or hanging.in_flight < 2:
        time.sleep(0.001)
    began = time.monotonic()
    pausing.close()
    assert [type(e.error) for e in pausing.poll() if isinstance(e, UploadFailed)] == [
        StoreFailed,
        StoreFailed,
    ]
    hanging.close()
    assert time.monotonic() - began < 5
    gate.opened.set()


def test_cpu_time_of_the_pool_is_told(tmp_path):
    class Busy(MemoryStore):
        def put(self, key, source, crc64=None):
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
            return super().put(key, source, crc64)

    uploader = uploader_of(Busy())
    for key, (path, stat) in staged(tmp_path, 4).items():
        uploader.submit(key, path, stat)
    ends(uploader, 4)
    assert 0.2 <= uploader.cpu_seconds < 1.0
    uploader.close()


def test_cpu_time_of_threads_is_found_by_their_names(tmp_path):
    name = (Path("/proc/thread-self") / "comm").read_text().strip()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert named_threads_seconds(name) >= 0.04
    assert named_threads_seconds("no thread has this name") == 0.0


MIXED = {
    Fault.ERROR_BEFORE: 0.1,
    Fault.ERROR_AFTER: 0.1,
    Fault.TRUNCATED: 0.15,
    Fault.EMPTY: 0.1,
    Fault.STALL: 0.05,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_faulty_store_never_makes_a_false_done(tmp_path, seed):
    found = store_faults(tmp_path / "site", seed=seed, faults=MIXED)
    print(found.outcomes)
    assert (found.false_dones, found.unclean) == ([], [])


def test_sabotage_without_looking_at_the_object_is_found_by_store_faults(tmp_path):
    found = store_faults(
        tmp_path / "site", seed=0, faults=MIXED, build=Build(uploader=BlindUploader)
    )
    assert found.false_dones
