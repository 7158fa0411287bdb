import errno
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.durable import staged_depot
from paceline.durable.budget import Budget
from paceline.durable.checksum import crc64_hex
from paceline.durable.crash import FaultyFs, UnsyncedFs
from paceline.durable.depot import Depot, Failed, Verified
from paceline.durable.errors import IntegrityError, StoreFailed
from paceline.durable.faulty import Fault, FaultyStore
from paceline.durable.fs import REAL_FS, RealFileSystem
from paceline.durable.journal import Journal
from paceline.durable.local_depot import LocalDepot
from paceline.durable.space import Space, read_space
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import Staging
from paceline.durable.store import LocalStore, MemoryStore, Stat, write_verified
from paceline.durable.uploader import Uploader
from small_disks import small_disk


class Disk:
    """The room that a depot sees: 1,000,000 bytes."""

    def __init__(self):
        self.used = 0

    def read(self, _: Path) -> Space:
        return Space(1_000_000, self.used, 1_000_000 - self.used)


class World:
    """Depots over `tmp_path`, a disk that says what it is told to, and a clock to move."""

    def __init__(self, root: Path, stack: ExitStack):
        self.root, self.stack = root, stack
        self.now = 0.0
        self.disk = Disk()
        self.told: list[str] = []
        self.run = root / "run"
        self.journal = stack.enter_context(Journal(self.run / "journal.jsonl"))

    def local(self, **options) -> LocalDepot:
        fs = options.pop("fs", REAL_FS)
        store = LocalStore(options.pop("folder", self.root / "store"), fs=fs)
        return LocalDepot(store, self.journal, "f00d", fs=fs, **self._common(options))

    def staged(self, store=None, **options) -> StagedDepot:
        store = store or MemoryStore()
        staging = options.pop("staging", None) or Staging(self.root / "shm", self.run)
        uploader = Uploader(
            store, concurrency=2, first_pause=0.001, give_up=options.pop("give_up", 5.0)
        )
        budget = options.pop("budget", None) or Budget(10_000)
        depot = StagedDepot(store, staging, self.journal, "f00d", budget, uploader,
                            tell=self.told.append, **self._common(options))  # fmt: skip
        self.stack.callback(depot.close)
        return depot

    def _common(self, options):
        return {
            "samples": lambda key: len(key),
            "read": self.disk.read,
            "clock": lambda: self.now,
            **options,
        }

    def records(self, kind: str | None = None) -> list[str]:
        return [r["key"] for r in self.journal.records if kind in (None, r["kind"])]


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def write(depot: Depot, key: str, size: int = 1000) -> Stat:
    return write_verified(depot.place(key), [bytes(size)])


def make(depot: Depot, key: str, size: int = 1000) -> Stat:
    assert depot.admit(key, size) is None
    stat = write(depot, key, size)
    depot.made(key, stat)
    return stat


def ends(depot: Depot, count: int = 1) -> list[Verified | Failed]:
    found, deadline = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ended"
        found += depot.poll()
        time.sleep(0.001)
    return found


def reason(depot: Depot, key: str, size: int, kind: str) -> str:
    wait = depot.admit(key, size)
    assert wait is not None
    assert wait.kind == kind
    assert depot.meters().waiting == wait
    return wait.reason


# ---- local


def test_local_a_unit_is_recorded_once_it_stands(world):
    depot = world.local()
    assert depot.place("a/unit-0") == world.root / "store" / "a" / "unit-0"
    stat = make(depot, "a/unit-0")
    assert depot.pending == 1
    assert depot.poll() == [Verified("a/unit-0", stat)]
    assert depot.poll() == []
    assert depot.pending == 0
    (record,) = world.journal.records
    assert record == {
        "v": 1,
        "seq": 0,
        "kind": "verified",
        "key": "a/unit-0",
        "fingerprint": "f00d",
        "samples": 8,
        "size": 1000,
        "crc64": crc64_hex(stat.crc64),
    }


@pytest.mark.parametrize("kind", ["local", "staged"])
@pytest.mark.parametrize("size", [None, 999])
def test_a_worker_that_tells_of_what_is_not_there_is_not_believed(world, kind, size):
    depot: Depot = world.local() if kind == "local" else world.staged()
    assert depot.admit("unit-0", 1000) is None
    if size is not None:
        write(depot, "unit-0", size)
    depot.made("unit-0", Stat(1000, 1))
    (failed,) = depot.poll()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, IntegrityError)
    assert world.records() == []
    assert depot.pending == 0
    assert depot.meters().staging_bytes == 0


def test_local_a_full_disk_is_waited_for_and_a_rather_full_one_is_not(world):
    depot = world.local(space_wait=60.0)
    world.disk.used = 980_000
    assert depot.admit("unit-0", 9000) is None
    depot.abandon("unit-0")
    world.disk.used = 981_000
    assert depot.admit("unit-0", 9000) is None, "19 kB hold it, and a hundredth stays free"
    depot.abandon("unit-0")
    world.disk.used = 981_001
    why = reason(depot, "unit-0", 9000, "space")
    assert f"{world.root}/store is 98 % full (19.0 kB free): the next shard may take 9.0 kB" in why
    assert why.endswith(", and 10.0 kB stay free. Make room there.")
    world.now = 60.0
    assert depot.overdue() is None
    world.now = 61.0
    assert depot.overdue() == f"No space left on device for 61 s: {why}"
    world.disk.used = 981_000
    assert depot.admit("unit-0", 9000) is None
    assert depot.overdue() is None
    assert depot.meters().waiting is None
    assert depot.meters().stall_seconds == {"space": 61.0}
    (advice,) = depot.suggest(100.0)
    assert "had no room for 61 s of 100 s: make room there" in advice
    assert depot.suggest(100_000.0) == []


def test_local_nothing_is_admitted_that_the_free_bytes_do_not_hold(world):
    depot = world.local()
    world.disk.used = 980_000
    assert depot.admit("unit-0", 6000) is None
    assert "the next shard may take 5.0 kB beside 6.0 kB" in reason(depot, "unit-1", 5000, "space")
    depot.abandon("unit-0")
    assert depot.admit("unit-1", 5000) is None


def test_local_progress_in_between_is_not_a_wait_that_lasts(world):
    depot = world.local(space_wait=10.0)
    assert depot.admit("unit-0", 1000) is None
    world.disk.used = 999_000
    assert depot.admit("unit-1", 1000)
    world.now = 9.0
    depot.made("unit-0", write(depot, "unit-0"))
    world.now = 12.0
    assert depot.admit("unit-1", 1000)
    assert depot.overdue() is None
    world.now = 20.0
    assert depot.overdue()


def test_local_abandon_leaves_whole_units_and_removes_half_ones(world):
    depot = world.local()
    assert depot.admit("unit-0", 1000) is None
    write(depot, "unit-0")
    half = depot.place("unit-0").with_name("unit-0.4711.partial")
    half.touch()
    depot.abandon("unit-0")
    assert depot.place("unit-0").exists()
    assert not half.exists()


# ---- the disk is full


def test_enospc_of_a_worker_pauses_tries_again_and_gives_up_in_time(world):
    depot = world.local(space_wait=5.0)
    full = OSError(errno.ENOSPC, "No space left on device", "/store/unit-0")
    assert depot.admit("unit-0", 1000) is None
    depot.refused("unit-0", full)
    assert reason(depot, "unit-0", 1000, "space").startswith(
        "/store/unit-0: No space left on device"
    )
    for _ in range(3):
        world.now += 1.0
        if depot.admit("unit-0", 1000) is None:
            depot.refused("unit-0", full)
            assert depot.admit("unit-0", 1000)
    assert depot.overdue() is None
    world.now = 5.1
    assert depot.overdue(), "tries in between are no progress"
    world.now = 9.0
    make(depot, "unit-0")
    assert depot.meters().waiting is None, "the last unit has no other behind it"
    assert depot.admit("unit-1", 1000) is None
    assert depot.overdue() is None


def test_real_enospc_pauses_and_goes_on_by_itself_when_there_is_room(world):
    with small_disk(world.root / "disk", 1 << 20) as disk, ExitStack() as stack:
        options = {"clock": time.monotonic}
        store = LocalStore(disk / "store")
        depot = LocalDepot(store, world.journal, "f00d", samples=len, space_wait=0.3, **options)
        assert depot.admit("unit-0", 300_000) is None
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(900_000))  # others write there too
        with pytest.raises(OSError, match="No space left") as caught:
            write(depot, "unit-0", 300_000)
        depot.refused("unit-0", caught.value)
        assert list((disk / "store").iterdir()) == []
        why = reason(depot, "unit-0", 300_000, "space")
        assert "No space left on device" in why
        deadline = time.monotonic() + 10
        while "ballast of " not in why:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            why = reason(depot, "unit-0", 300_000, "space")
        time.sleep(max(0.0, 0.35 - depot.meters().stall_seconds["space"]))
        assert (depot.overdue() or "").startswith(f"{disk}/store/unit-0")
        timer = threading.Timer(0.1, ballast.unlink)
        stack.callback(timer.join)
        timer.start()
        while depot.admit("unit-0", 300_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        depot.made("unit-0", write(depot, "unit-0", 300_000))
        assert isinstance(depot.poll()[0], Verified)
        assert depot.admit("unit-1", 300_000) is None


def test_a_journal_on_a_full_disk_is_waited_for_and_nothing_is_lost(world):
    with small_disk(world.root / "disk", 1 << 20) as disk:
        with Journal(disk / "journal.jsonl") as journal:
            world.journal = journal
            depot = world.local(space_wait=30.0)
            make(depot, "unit-0")
            assert len(depot.poll()) == 1
            ballast = disk / "ballast"
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(bytes(1 << 20))
            sizes = []
            while not depot.meters().waiting:  # a page of the journal may have room left
                assert len(sizes) < 100
                sizes.append(make(depot, f"unit-{len(sizes) + 1}"))
            done = len(depot.poll())
            assert done == len(sizes) - 1
            assert "journal.jsonl: No space left" in reason(depot, "unit-x", 1, "journal")
            assert depot.pending == 1
            world.now = 31.0
            assert "journal.jsonl" in (depot.overdue() or "")
            ballast.unlink()
            (last,) = depot.poll()
            assert last == Verified(f"unit-{len(sizes)}", sizes[-1])
            assert depot.overdue() is None
            assert depot.admit("unit-x", 1) is None
            assert len(world.records()) == len(sizes) + 1
        with Journal(disk / "journal.jsonl") as journal:
            assert len(journal.records) == len(sizes) + 1


def test_a_journal_that_fails_for_other_reasons_ends_the_run(tmp_path):
    fs = FaultyFs(UnsyncedFs(), fail_at=0, error=errno.EIO)
    with Journal(tmp_path / "journal.jsonl", fs=fs) as journal:
        store = LocalStore(tmp_path / "store")
        depot = LocalDepot(store, journal, "f00d", samples=lambda _: 1)
        assert depot.admit("unit-0", 1000) is None
        stat = write(depot, "unit-0")
        fs._fail_at = fs.calls + 1
        with pytest.raises(OSError, match="Input/output"):
            depot.made("unit-0", stat)
        assert journal.records == ()


# ---- staged


def test_staged_a_unit_is_recorded_put_verified_recorded_and_then_freed(world):
    store = MemoryStore()
    depot = world.staged(store)
    seen = []

    class Watching(RealFileSystem):
        def unlink(self, path):
            seen.append((path.name, world.records("verified"), store.head(path.name)))
            super().unlink(path)

    depot._areas[0].staging._fs = Watching()
    stat = make(depot, "unit-0")
    assert world.records("staged") == ["unit-0"]
    assert depot.pending == 1
    assert ends(depot) == [Verified("unit-0", stat)]
    assert store.head("unit-0") == stat
    assert world.records() == ["unit-0", "unit-0"]
    assert seen == [("unit-0", ["unit-0"], stat)], "freed before it was proven"
    meters = depot.meters()
    assert (meters.staging_bytes, meters.backlog_units, meters.backlog_bytes) == (0, 0, 0)
    assert meters.uploaded_bytes == 1000
    assert depot.pending == 0


def test_staged_the_budget_is_reserved_settled_and_waited_for(world):
    gate = threading.Event()

    class Gated(MemoryStore):
        def put(self, key, source, crc64=None):
            gate.wait(20)
            return super().put(key, source, crc64)

    depot = world.staged(Gated(), space_wait=10.0, hung_after=100.0)
    assert depot.admit("unit-0", 6000) is None
    assert depot.meters().staging_bytes == 6000
    assert "6,000 of 10,000 bytes are taken" in reason(depot, "unit-1", 6000, "budget")
    depot.made("unit-0", write(depot, "unit-0", 3000))
    assert depot.meters().staging_bytes == 3000
    make(depot, "unit-1", 6000)
    assert "2 shards on their way to memory:" in reason(depot, "unit-2", 6000, "budget")
    world.now = 50.0
    assert depot.overdue() is None, "a full staging is the normal course of things"
    world.now = 101.0
    assert "9,000 of 10,000" in (depot.overdue() or ""), "but not without any upload ending"
    gate.set()
    assert len(ends(depot, 2)) == 2
    assert depot.admit("unit-2", 6000) is None
    assert depot.overdue() is None
    assert depot.meters().stall_seconds["budget"] == 101.0
    with pytest.raises(ValueError, match="budget of 10000"):
        depot.admit("unit-3", 10_001)


def test_staged_more_bytes_than_reserved_are_kept_counted_and_warned_of(world, caplog):
    """An estimate that was no upper bound ends no run, neither this one nor the next."""
    depot = world.staged(budget=Budget(1500))
    assert depot.admit("unit-0", 1000) is None
    stat = write(depot, "unit-0", 2000)
    depot.made("unit-0", stat)
    assert depot.meters().staging_bytes == 2000
    assert "unit-0 takes 2,000 bytes, and 1,000 were reserved for it" in caplog.text
    reason(depot, "unit-1", 1, "budget")
    assert ends(depot) == [Verified("unit-0", stat)]
    assert depot.meters().staging_bytes == 0
    make(depot, "unit-1", 1500)


def test_staged_abandon_frees_bytes_and_files(world):
    depot = world.staged()
    assert depot.admit("unit-0", 9000) is None
    place = depot.place("unit-0")
    write(depot, "unit-0")
    half = place.with_name("unit-0.4711.partial")
    half.touch()
    depot.abandon("unit-0")
    assert not place.exists()
    assert not half.exists()
    assert depot.meters().staging_bytes == 0
    make(depot, "unit-0", 9000)


def test_staged_who_waits_for_room_is_told_which_upload_takes_long(world, monkeypatch):
    monkeypatch.setattr(staged_depot, "_LONG", 0.05)
    gate = threading.Event()

    class Gated(MemoryStore):
        def put(self, key, source, crc64=None):
            gate.wait(20)
            return super().put(key, source, crc64)

    depot = world.staged(Gated(), budget=Budget(10_000))
    make(depot, "unit-0", 9000)
    while not depot.meters().in_flight:
        time.sleep(0.001)
    time.sleep(0.06)
    why = reason(depot, "unit-1", 9000, "budget")
    assert why.endswith("1 shard on their way to memory:, unit-0 for 0 s now")
    gate.set()


def test_staged_a_hanging_upload_is_named(world):
    gate = threading.Event()

    class Gated(MemoryStore):
        def put(self, key, source, crc64=None):
            gate.wait(20)
            return super().put(key, source, crc64)

    depot = world.staged(Gated(), space_wait=1.0, hung_after=10.0)
    make(depot, "unit-0")
    while not depot.meters().in_flight:
        time.sleep(0.001)
    assert depot.overdue() is None
    world.now = 10.1
    assert "memory:: unit-0 has been on its way" in (depot.overdue() or "")
    gate.set()
    ends(depot)


def test_staged_a_damaged_file_is_a_failed_unit_to_be_made_again(world):
    hold = threading.Event()

    class Held(MemoryStore):
        def put(self, key, source, crc64=None):
            hold.wait(20)
            return super().put(key, source, crc64)

    depot = world.staged(Held())
    make(depot, "unit-0")
    depot.place("unit-0").write_bytes(b"rotten")
    hold.set()
    (failed,) = ends(depot)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, IntegrityError)
    assert depot.overdue() is None
    assert depot.meters().staging_bytes == 0
    assert world.records("verified") == []
    make(depot, "unit-0")
    assert isinstance(ends(depot)[0], Verified)


def test_staged_a_store_that_says_no_keeps_the_unit_for_the_next_start(world):
    class Refusing(MemoryStore):
        def put(self, key, source, crc64=None):
            raise StoreFailed("s3://b: put unit-0: 403. Give this key the right.", False)

    depot = world.staged(Refusing())
    stat = make(depot, "unit-0")
    (failed,) = ends(depot)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StoreFailed)
    assert depot.pending == 0
    assert (depot.overdue() or "").startswith("s3://b: put unit-0: 403")
    assert "403" in reason(depot, "unit-1", 10, "store")
    assert depot.meters().staging_bytes == 1000
    depot.close()

    store = MemoryStore()
    again = world.staged(store)
    assert again.recovered == {"unit-0": stat}
    assert ends(again) == [Verified("unit-0", stat)]
    assert "1 shard of an earlier start is whole" in world.told[0]


def test_staged_a_store_without_an_answer_is_what_one_waits_for(world):
    store = FaultyStore(MemoryStore(), faults={Fault.ERROR_BEFORE: 1.0})
    depot = world.staged(store, budget=Budget(1000), space_wait=10.0)
    make(depot, "unit-0")
    while depot.meters().last_error is None:
        time.sleep(0.001)
    assert "unit-0: refused" in reason(depot, "unit-1", 1000, "store")
    world.now = 11.0
    assert "unit-0: refused" in (depot.overdue() or "")
    assert depot.meters().retries > 0
    assert "did not take uploads for 11 s of 20 s" in depot.suggest(20.0)[0]


def test_staged_what_cannot_be_removed_keeps_its_bytes_until_it_can(world):
    class Stubborn(RealFileSystem):
        refuses = True

        def unlink(self, path):
            if self.refuses:
                raise OSError(errno.EIO, "Input/output error", str(path))
            super().unlink(path)

    depot = world.staged(budget=Budget(1000))
    fs = depot._areas[0].staging._fs = Stubborn()
    make(depot, "unit-0")
    assert isinstance(ends(depot)[0], Verified)
    assert depot.meters().staging_bytes == 1000
    assert "cannot be removed" in reason(depot, "unit-1", 1000, "space")
    fs.refuses = False
    depot.poll()
    assert depot.admit("unit-1", 1000) is None


# ---- an earlier start


def test_a_start_uploads_what_was_staged_and_removes_what_proves_nothing(world):
    staging = Staging(world.root / "shm", world.run)
    first = world.staged(FaultyStore(MemoryStore(), faults={Fault.ERROR_BEFORE: 1.0}), give_up=60.0,
                         staging=staging)  # fmt: skip
    stats = {key: make(first, key) for key in ("unit-0", "unit-1", "unit-2")}
    first.admit("unit-3", 1000)
    write(first, "unit-3")  # its worker had not told yet
    first.close()
    staging.path("unit-1").write_bytes(bytes(999))
    record = {"kind": "verified", "key": "unit-2", "fingerprint": "f00d", "samples": 1}
    world.journal.append(record | {"size": 1000, "crc64": crc64_hex(stats["unit-2"].crc64)})

    store = MemoryStore()
    budget = Budget(500)
    again = world.staged(store, budget=budget)
    assert again.recovered == {"unit-0": stats["unit-0"]}
    assert again.pending == 1
    assert budget.held == 1000, "bytes that lie there count, whatever the limit"
    assert ends(again) == [Verified("unit-0", stats["unit-0"])]
    assert list(world.root.glob("shm/*/units/*")) == []
    text = "\n".join(world.told)
    assert "removed unit-1: 999 bytes, not the recorded 1000." in text
    assert "removed unit-2: not recorded as waiting." in text
    assert "removed unit-3: not recorded as waiting." in text


def test_what_another_fingerprint_had_staged_is_never_uploaded(world):
    staging = Staging(world.root / "shm", world.run)
    stat = write_verified(staging.path("unit-0"), [bytes(10)])
    staging.close()
    world.journal.append(
        {"kind": "staged", "key": "unit-0", "fingerprint": "0ther", "samples": 1}
        | {"size": 10, "crc64": crc64_hex(stat.crc64)}
    )
    depot = world.staged()
    assert depot.recovered == {}
    assert list(world.root.glob("shm/*/units/*")) == []


def test_an_object_that_was_put_before_the_crash_is_not_put_again(world):
    store = FaultyStore(MemoryStore())
    staging = Staging(world.root / "shm", world.run)
    stat = write_verified(staging.path("unit-0"), [bytes(10)])
    store.put("unit-0", bytes(10))
    staging.close()
    world.journal.append(
        {"kind": "staged", "key": "unit-0", "fingerprint": "f00d", "samples": 1}
        | {"size": 10, "crc64": crc64_hex(stat.crc64)}
    )
    assert ends(world.staged(store)) == [Verified("unit-0", stat)]
    assert store._calls["put", "unit-0"] == 1


# ---- others fill the staging disk


def test_shared_memory_that_others_fill_is_named_and_left_for_the_run_directory(world):
    with small_disk(world.root / "disk", 4 << 20) as shm, ExitStack() as stack:
        stack.callback(world.stack.close)  # before the disk goes
        fallback = Staging(world.root / "run" / "staging", world.run)

        def read(path: Path) -> Space:
            return read_space(path) if path.is_relative_to(shm) else Space(100, 0, 10**9)

        depot = world.staged(
            staging=Staging(shm, world.run), fallback=fallback, read=read, budget=Budget(1 << 20)
        )
        make(depot, "unit-0")
        assert world.records("staged") == ["unit-0"]
        ends(depot)
        (shm / "psm_4711").write_bytes(bytes(3_600_000))
        make(depot, "unit-1")
        assert depot.place("unit-1").is_relative_to(fallback.root)
        ends(depot)
        assert world.told[-1] == f"Shards are staged in {fallback.root} from now on."
        (shm / "psm_4711").unlink()
        make(depot, "unit-2")
        assert depot.place("unit-2").is_relative_to(shm)
        ends(depot)


def test_shared_memory_that_others_fill_is_never_waited_for_in_silence(world):
    with small_disk(world.root / "disk", 4 << 20) as shm, ExitStack() as stack:
        stack.callback(world.stack.close)  # before the disk goes
        depot = world.staged(
            staging=Staging(shm, world.run), read=read_space, budget=Budget(1 << 20), space_wait=9.0
        )
        (shm / "psm_4711").write_bytes(bytes(3_600_000))
        deadline = time.monotonic() + 10
        while not world.told:
            assert time.monotonic() < deadline
            why = reason(depot, "unit-0", 1000, "space")
            time.sleep(0.01)
        why = reason(depot, "unit-0", 1000, "space")
        assert "% full" in why
        assert f"largest there: {shm}/psm_4711 of root (3.6 MB)" in why
        assert "Nothing of this run lies there" in why
        assert world.told == [why], "said once"
        world.now = 9.5
        assert depot.overdue() == f"No space left on device for 10 s: {why}"


def test_above_the_high_mark_with_ours_in_flight_one_waits_for_those(world):
    gate = threading.Event()

    class Gated(MemoryStore):
        def put(self, key, source, crc64=None):
            gate.wait(20)
            return super().put(key, source, crc64)

    fallback = Staging(world.root / "other", world.run)
    depot = world.staged(Gated(), fallback=fallback)
    make(depot, "unit-0")
    world.disk.used = 850_000
    assert "above 80 %" in reason(depot, "unit-1", 1000, "space")
    gate.set()
    ends(depot)
    world.disk.used = 750_000
    assert depot.admit("unit-1", 1000) is None, "what is left there is not ours to wait for"
    assert depot.place("unit-1").is_relative_to(world.root / "shm")
