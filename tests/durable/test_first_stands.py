"""Several processes make units for one store: the first that stands is kept."""

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.durable.budget import Budget
from paceline.durable.checksum import crc64
from paceline.durable.crash import FaultyFs, UnsyncedFs
from paceline.durable.depot import Depot, Failed, Judge, Verified
from paceline.durable.errors import IntegrityError
from paceline.durable.fs import RealFileSystem, remove_dead_partials, settle
from paceline.durable.journal import Journal
from paceline.durable.local_depot import LocalDepot
from paceline.durable.object_store import ObjectStore
from paceline.durable.space import Space
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import Staging
from paceline.durable.store import LocalStore, MemoryStore, Stat, Store, write_verified
from paceline.durable.uploader import Uploaded, Uploader

OURS, THEIRS, TORN = b"ours" * 100, b"theirs" * 100, b"torn" * 100


def stat_of(data: bytes) -> Stat:
    return Stat(len(data), crc64(data))


def judge_of(store: Store) -> Judge:
    """What begins as a unit does is one; a header would say so."""

    def judge(key: str, size: int) -> Stat | None:
        data = store.get_range(key, 0, size)
        return stat_of(data) if data.startswith((b"ours", b"theirs")) else None

    return judge


class LinklessFs(RealFileSystem):
    """A mount that knows one name a file."""

    def link(self, source, target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(target))


# ---- a name for a file


@pytest.mark.parametrize("fs", [RealFileSystem(), LinklessFs()])
def test_a_file_gets_its_name_only_where_nothing_has_it(tmp_path, fs):
    one, two, name = tmp_path / "1.partial", tmp_path / "2.partial", tmp_path / "name"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert settle(one, name, fs=fs)
    assert not settle(two, name, fs=fs)
    assert name.read_bytes() == b"1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2.partial", "name"]


def test_a_name_that_a_network_mount_gave_at_its_first_try_is_ours(tmp_path):
    class Twice(RealFileSystem):
        def link(self, source, target):
            super().link(source, target)
            super().link(source, target)

    made, name = tmp_path / "x.partial", tmp_path / "x"
    made.write_bytes(b"1")
    assert settle(made, name, fs=Twice())
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_other_errors_of_a_link_are_told(tmp_path):
    made = tmp_path / "x.partial"
    made.write_bytes(b"1")
    fs = FaultyFs(UnsyncedFs(), fail_at=1, error=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        settle(made, tmp_path / "x", fs=fs)
    assert made.exists()


def _create(arguments: tuple[Path, int, float]) -> bool:
    folder, number, at = arguments
    while time.time() < at:
        pass
    try:
        LocalStore(folder).create("run.json", b"%d" % number)
    except IntegrityError:
        return False
    return True


def test_of_many_processes_that_create_an_object_one_does(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for number in range(10):
            folder = tmp_path / str(number)
            at = time.time() + 0.02
            created = pool.map(_create, [(folder, n, at) for n in range(4)], chunksize=1)
            assert created.count(True) == 1
            assert LocalStore(folder).get_range("run.json", 0, 1) == b"%d" % created.index(True)
            assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_create_of_the_same_bytes_is_success_and_never_replaces(tmp_path):
    store = LocalStore(tmp_path)
    assert store.create("x", OURS) == store.create("x", OURS) == stat_of(OURS)
    with pytest.raises(IntegrityError, match=r"x: it is there already"):
        store.create("x", THEIRS)
    assert store.head("x") == stat_of(OURS)
    with pytest.raises(ValueError, match="is not a key"):
        store.create("../x", OURS)


# ---- depots


class World:
    """A store that is shared, and the depot of one process before it."""

    def __init__(self, root: Path, kind: str, stack: ExitStack):
        self.kind, self.root, self.stack = kind, root, stack
        self.store: Store = LocalStore(root / "store") if kind == "local" else MemoryStore()
        self.told: list[str] = []
        self.journal = stack.enter_context(Journal(root / "journal.jsonl"))

    def depot(self, *, judge: Judge | None = None, **options) -> Depot:
        judge = judge or judge_of(self.store)
        common = {"samples": lambda _: 1, "tell": self.told.append,
                  "read": lambda _: Space(10**9, 0, 10**9)} | options  # fmt: skip
        if isinstance(self.store, LocalStore):
            return LocalDepot(self.store, self.journal, "f00d", judge=judge, **common)
        uploader = Uploader(self.store, concurrency=2, first_pause=0.001, judge=judge)
        staging = Staging(self.root / "shm", self.root)
        depot = StagedDepot(self.store, staging, self.journal, "f00d", Budget(10_000), uploader,
                            **common)  # fmt: skip
        self.stack.callback(depot.close)
        return depot

    def verified(self) -> dict[str, str]:
        records = self.journal.records
        return {r["key"]: r["crc64"] for r in records if r["kind"] == "verified"}

    def files(self) -> list[str]:
        """All of them, but for the journal and what says whose staging it is."""
        found = (p for p in self.root.rglob("*") if p.is_file())
        return sorted(p.name for p in found if "unit" in p.name)


@pytest.fixture(params=["local", "staged"])
def world(request, tmp_path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, request.param, stack)


def write(depot: Depot, key: str, data: bytes = OURS) -> Stat:
    assert depot.admit(key, 1000) is None
    return write_verified(depot.place(key), [data])


def ends(depot: Depot, count: int) -> list[Verified | Failed]:
    found, deadline = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline
        found += depot.poll()
        time.sleep(0.001)
    return found


def test_the_second_says_so_and_keeps_what_the_first_has_stored(world):
    depot = world.depot()
    stats = [write(depot, f"unit-{n}") for n in range(3)]
    for n in (0, 1):
        world.store.put(f"unit-{n}", THEIRS)
    for n, stat in enumerate(stats):
        depot.made(f"unit-{n}", stat)
    assert sorted(ends(depot, 3), key=lambda end: end.key) == [
        Verified("unit-0", stat_of(THEIRS)),
        Verified("unit-1", stat_of(THEIRS)),
        Verified("unit-2", stat_of(OURS)),
    ]
    assert world.store.head("unit-0") == world.store.head("unit-1") == stat_of(THEIRS)
    assert world.store.head("unit-2") == stat_of(OURS)
    assert depot.meters().others_first == 2
    (told,) = world.told
    assert "was there before this one was" in told
    assert world.verified() == {
        f"unit-{n}": f"{stat_of(OURS if n == 2 else THEIRS).crc64:016x}" for n in range(3)
    }
    assert depot.meters().staging_bytes == 0
    there = [f"unit-{n}" for n in range(3)] if world.kind == "local" else []
    assert world.files() == there, "nothing waits any more"


def test_what_is_there_and_is_not_the_unit_is_replaced(world):
    depot = world.depot()
    stat = write(depot, "unit-0")
    world.store.put("unit-0", TORN)
    depot.made("unit-0", stat)
    assert ends(depot, 1) == [Verified("unit-0", stat)]
    assert world.store.head("unit-0") == stat
    assert depot.meters().others_first == 0
    assert world.told == []


def test_what_is_there_and_is_just_the_same_was_another_processs_all_the_same(world):
    depot = world.depot()
    stat = write(depot, "unit-0")
    world.store.put("unit-0", OURS)
    depot.made("unit-0", stat)
    assert ends(depot, 1) == [Verified("unit-0", stat)]
    assert depot.meters().others_first == 1


def test_a_judge_that_fails_for_good_is_heard(world):
    def judge(key, size):
        raise PermissionError(errno.EACCES, "Permission denied", key)

    depot = world.depot(judge=judge)
    stat = write(depot, "unit-0")
    world.store.put("unit-0", THEIRS)
    depot.made("unit-0", stat)
    (failed,) = ends(depot, 1)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PermissionError)
    assert world.store.head("unit-0") == stat_of(THEIRS)
    assert world.verified() == {}


# ---- a folder


@pytest.fixture
def shared(tmp_path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, "local", stack)


def test_in_a_folder_nothing_has_its_name_before_it_is_whole(shared):
    depot = shared.depot()
    stat = write(depot, "unit-0")
    assert list(shared.store.list("")) == []
    assert depot.pending == 0
    depot.made("unit-0", stat)
    assert depot.pending == 1
    assert [found.key for found in shared.store.list("")] == ["unit-0"]
    assert remove_dead_partials(shared.root / "store", is_shared=True) == []


def test_in_a_folder_half_units_of_other_machines_are_theirs(shared):
    depot = shared.depot()
    write(depot, "unit-0")
    place = depot.place("unit-0")
    half = place.with_name(f"{place.name}.{os.getpid()}.partial")
    theirs = place.with_name(f"unit-0.{'0' * 8}.4711.partial")
    half.touch()
    theirs.touch()
    depot.abandon("unit-0")
    assert [p.name for p in place.parent.iterdir()] == [theirs.name]


def test_in_a_folder_without_links_the_first_stands_too(shared):
    depot = shared.depot(fs=LinklessFs())
    stats = [write(depot, f"unit-{n}") for n in range(2)]
    shared.store.put("unit-0", THEIRS)
    for n, stat in enumerate(stats):
        depot.made(f"unit-{n}", stat)
    assert [end.stat for end in depot.poll() if isinstance(end, Verified)] == [
        stat_of(THEIRS),
        stat_of(OURS),
    ]


def test_a_name_that_finds_no_room_is_waited_for(shared):
    class Full(UnsyncedFs):
        is_full = True

        def link(self, source, target):
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device", str(target))
            super().link(source, target)

    fs, now = Full(), [0.0]
    depot = shared.depot(fs=fs, space_wait=10.0, clock=lambda: now[0])
    stat = write(depot, "unit-0")
    depot.made("unit-0", stat)
    assert depot.poll() == []
    assert depot.pending == 1
    wait = depot.admit("unit-1", 1000)
    assert wait is not None
    assert "unit-0: No space left on device. Make room there." in wait.reason
    now[0] = 11.0
    assert "No space left" in (depot.overdue() or "")
    # The name that it waits under is this process's: nobody else would take it up.
    waiting = depot.place("unit-0").read_bytes()
    depot.close()
    assert not depot.place("unit-0").exists()
    depot.place("unit-0").write_bytes(waiting)
    fs.is_full = False
    assert depot.poll() == [Verified("unit-0", stat)]
    assert depot.overdue() is None
    assert depot.admit("unit-1", 1000) is None


def test_two_depots_over_one_folder_at_once_keep_one_of_each(tmp_path):
    """Whatever the order: both tell of the same bytes for every unit."""
    store = LocalStore(tmp_path / "store")
    keys = [f"unit-{n}" for n in range(60)]

    def work(data: bytes) -> dict[str, Stat]:
        name = data[:4].decode()
        with Journal(tmp_path / f"{name}.jsonl") as journal:
            depot = LocalDepot(store, journal, "f00d", samples=lambda _: 1, judge=judge_of(store),
                               read=lambda _: Space(10**9, 0, 10**9))  # fmt: skip
            # Two processes would have names of their own.
            depot.place = lambda key: store.path(key).with_name(f"{key}.{name}.partial")  # type: ignore[method-assign]
            found: dict[str, Stat] = {}
            for key in keys:
                depot.made(key, write(depot, key, data))
                found |= {end.key: end.stat for end in depot.poll() if isinstance(end, Verified)}
            return found

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(work, [OURS, THEIRS])
    assert one == two == {key: store.head(key) for key in keys}
    assert len({stat.crc64 for stat in one.values()}) in (1, 2)


# ---- uploads


def test_an_upload_whose_answer_was_lost_is_its_own(tmp_path):
    class Losing(MemoryStore):
        puts = 0

        def put(self, key, source, crc64=None):
            self.puts += 1
            super().put(key, source, crc64)
            raise TimeoutError("no answer")

    store, path = Losing(), tmp_path / "unit-0"
    path.write_bytes(OURS)
    uploader = Uploader(store, concurrency=1, first_pause=0.001, judge=judge_of(store))
    uploader.submit("unit-0", path, stat_of(OURS))
    found = []
    while not found:
        found = uploader.poll()
        time.sleep(0.001)
    assert found == [Uploaded("unit-0", stat_of(OURS))]
    assert store.puts == 1
    uploader.close()


def test_an_object_whose_words_are_not_its_header_is_replaced(tmp_path):
    """The store says another checksum than the header promises: one of them is wrong."""
    store, path = MemoryStore(), tmp_path / "unit-0"
    path.write_bytes(OURS)
    store.put("unit-0", THEIRS)
    uploader = Uploader(store, concurrency=1, judge=lambda key, size: Stat(size, 1))
    uploader.submit("unit-0", path, stat_of(OURS))
    while store.head("unit-0") != stat_of(OURS):
        time.sleep(0.001)
    uploader.close(wait=True)
    assert uploader.poll() == [Uploaded("unit-0", stat_of(OURS))]


def test_two_uploaders_at_once_to_a_real_server_agree_in_the_end(tmp_path, s3):
    """Objects in parts: whoever completes first stands, also where both had begun.

    Of smaller ones S3 promises as much, and SeaweedFS does not: it looks, and then writes.
    """
    size = 6 << 20
    with s3.credentials():
        url = s3.url(f"{tmp_path.name}")
        stores = [ObjectStore(url, s3.options, part_size=5 << 20) for _ in range(2)]
        data = [bytes([n]) * size for n in (1, 2)]
        started = threading.Barrier(2)

        def judge(key: str, _: int) -> Stat | None:
            return stores[0].head(key)

        def work(n: int) -> dict[str, Stat]:
            path = tmp_path / f"made-{n}"
            path.write_bytes(data[n])
            uploader = Uploader(stores[n], concurrency=3, first_pause=0.01, judge=judge)
            started.wait(10)
            for number in range(6):
                uploader.submit(f"unit-{number}", path, stat_of(data[n]))
            uploader.close(wait=True)
            return {end.key: end.stat for end in uploader.poll() if isinstance(end, Uploaded)}

        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(work, range(2)))
        there = {f"unit-{n}": stores[0].head(f"unit-{n}") for n in range(6)}
        assert both[0] == both[1] == there
        assert set(there.values()) <= {stat_of(data[0]), stat_of(data[1])}
