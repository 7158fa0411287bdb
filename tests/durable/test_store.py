import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.durable.checksum import crc64
from paceline.durable.errors import IntegrityError
from paceline.durable.faulty import FaultyStore
from paceline.durable.fs import RealFileSystem
from paceline.durable.iowatch import IoWatch
from paceline.durable.object_store import ObjectStore
from paceline.durable.store import LocalStore, MemoryStore, Stat, Store
from paceline.durable.watched_store import WatchedStore

DATA = bytes(range(256)) * 50


@pytest.fixture(params=["local", "memory", "faulty", "watched", "s3"])
def store(request, tmp_path) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore(tmp_path / "store")
    elif request.param == "memory":
        yield MemoryStore()
    elif request.param == "faulty":
        yield FaultyStore(LocalStore(tmp_path / "store"))
    elif request.param == "watched":
        watch = IoWatch()
        yield WatchedStore(LocalStore(tmp_path / "store"), watch)
        assert watch.ongoing() == []
    else:
        s3 = request.getfixturevalue("s3")
        with s3.credentials():
            yield ObjectStore(s3.url(tmp_path.name), s3.options)


def keys(store: Store, prefix: str, after: str = "") -> list[str]:
    return [found.key for found in store.list(prefix, after)]


def test_there_are_six_methods():
    assert {n for n in vars(Store) if not n.startswith("_")} == {
        "put", "head", "get_range", "list", "delete", "url",
    }  # fmt: skip


def test_put_head_get(store):
    assert store.head("a/b.bin") is None
    stat = store.put("a/b.bin", DATA)
    assert stat == store.head("a/b.bin") == Stat(len(DATA), crc64(DATA))
    assert store.get_range("a/b.bin", 0, len(DATA)) == DATA
    assert store.get_range("a/b.bin", 100, 103) == DATA[100:103]
    assert store.get_range("a/b.bin", 7, 7) == b""


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_sources_in_memory(store, kind):
    assert store.put("x", kind(DATA)) == Stat(len(DATA), crc64(DATA))
    assert store.get_range("x", 0, len(DATA)) == DATA


def test_a_file_is_a_source_and_stays(store, tmp_path):
    file = tmp_path / "staged"
    file.write_bytes(DATA)
    assert store.put("x", file, crc64(DATA)) == Stat(len(DATA), crc64(DATA))
    assert store.get_range("x", 0, len(DATA)) == DATA
    assert file.read_bytes() == DATA


def test_empty_object(store):
    assert store.put("empty", b"") == Stat(0, 0)
    assert store.head("empty") == Stat(0, 0)
    assert store.get_range("empty", 0, 0) == b""


def test_put_replaces(store):
    store.put("x", DATA)
    store.put("x", b"new")
    assert store.get_range("x", 0, 3) == b"new"
    assert store.head("x") == Stat(3, crc64(b"new"))


def test_a_wrong_checksum_leaves_the_key_as_it_was(store):
    with pytest.raises(IntegrityError):
        store.put("x", DATA, crc64(DATA) ^ 1)
    assert store.head("x") is None
    assert keys(store, "") == []
    store.put("x", b"old")
    with pytest.raises(IntegrityError):
        store.put("x", DATA, 0)
    assert store.get_range("x", 0, 3) == b"old"


def test_list_is_sorted_by_prefix_and_resumes(store):
    for key in ("b/2", "a", "b/10", "b.x", "c", "b/1"):
        store.put(key, b"1")
    assert keys(store, "") == ["a", "b.x", "b/1", "b/10", "b/2", "c"]
    assert keys(store, "b/") == ["b/1", "b/10", "b/2"]
    assert keys(store, "b/", after="b/1") == ["b/10", "b/2"]
    assert keys(store, "", after="b/15") == ["b/2", "c"]
    assert keys(store, "none") == []


def test_delete(store):
    store.put("a/1", b"1")
    store.put("a/2", b"2")
    store.delete(["a/1", "a/absent", "never/was"])
    assert keys(store, "") == ["a/2"]
    assert store.head("a/1") is None


def test_ranges_and_keys_that_are_not_there(store):
    store.put("x", b"12345")
    with pytest.raises(KeyError):
        store.get_range("y", 0, 1)
    for start, end in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="x"):
            store.get_range("x", start, end)


BAD_KEYS = ["", "/etc/x", "../x", "a/../x", "a//b", "a/", ".", "..", ".hidden", "a\\b", "a\0b",
            "x.partial", "a/y.7.partial", "ä", "a b", "x\n"]  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_outside_the_grammar(store, key):
    for call in (
        lambda: store.put(key, b"1"),
        lambda: store.head(key),
        lambda: store.get_range(key, 0, 0),
        lambda: store.delete([key]),
    ):
        with pytest.raises(ValueError, match="is not a key"):
            call()


@given(key=st.text(st.sampled_from("ab./\\_- \0\n"), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_key_leaves_the_store(tmp_path, key):
    root = tmp_path / "deep" / "store"
    try:
        path = LocalStore(root).path(key)
    except ValueError:
        return
    assert path.resolve().is_relative_to(root.resolve())
    assert path.resolve() != root.resolve()


def test_url(tmp_path):
    assert LocalStore(tmp_path).url == f"file://{tmp_path}"
    assert MemoryStore().url == "memory:"


def test_files_being_written_and_foreign_names_are_no_objects(tmp_path):
    store = LocalStore(tmp_path)
    store.put("unit-1", DATA)
    (tmp_path / "unit-2.4711.partial").write_bytes(DATA)
    (tmp_path / ".nfs0001").write_bytes(DATA)
    assert keys(store, "") == ["unit-1"]


class Watching(RealFileSystem):
    """Notes the calls, and what is visible under the final name at each."""

    def __init__(self, final: Path):
        self.final = final
        self.calls = []

    def _note(self, call):
        self.calls.append((call, self.final.exists()))

    def write(self, file, data):
        self._note("write")
        super().write(file, data)

    def sync(self, file):
        self._note("sync")
        super().sync(file)

    def replace(self, source, target):
        self._note("replace")
        super().replace(source, target)

    def sync_dir(self, path):
        if path == self.final.parent:
            self._note("sync_dir")
        super().sync_dir(path)


def test_local_put_syncs_before_the_name_appears_and_the_folder_after(tmp_path):
    fs = Watching(tmp_path / "x")
    LocalStore(tmp_path, fs=fs).put("x", DATA)
    calls = [call for call, _ in fs.calls]
    assert calls[0] == "write"
    assert "sync" in calls[: calls.index("replace")]
    assert calls[-2:] == ["replace", "sync_dir"]
    assert [seen for _, seen in fs.calls] == [False] * (len(calls) - 1) + [True]


class Rotten(RealFileSystem):
    """Flips a bit, or loses the end, of what it is given."""

    def __init__(self, lose):
        self.lose = lose

    def write(self, file, data):
        changed = bytearray(data)
        if self.lose:
            del changed[-1]
        else:
            changed[len(changed) // 2] ^= 4
        super().write(file, bytes(changed))


@pytest.mark.parametrize("lose", [False, True])
def test_t_50_what_the_disk_changed_is_detected_before_the_name_appears(tmp_path, lose):
    store = LocalStore(tmp_path, fs=Rotten(lose))
    with pytest.raises(IntegrityError, match="read back"):
        store.put("x", DATA)
    assert list(tmp_path.iterdir()) == []


class FailsAt(RealFileSystem):
    """Raises at the n-th call that changes the disk."""

    def __init__(self, n):
        self.left = n

    def _step(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "Input/output error")

    def open_new(self, path):
        self._step()
        return super().open_new(path)

    def write(self, file, data):
        self._step()
        super().write(file, data)

    def sync(self, file):
        self._step()
        super().sync(file)

    def replace(self, source, target):
        self._step()
        super().replace(source, target)

    def sync_dir(self, path):
        self._step()
        super().sync_dir(path)


def test_the_nth_error_never_leaves_half_an_object(tmp_path):
    LocalStore(tmp_path).put("x", b"old")
    for n in range(1, 100):
        fs = FailsAt(n)
        try:
            LocalStore(tmp_path, fs=fs).put("x", DATA)
        except OSError:
            # A folder that cannot be synced leaves the new object whole, only not acknowledged.
            assert (tmp_path / "x").read_bytes() in (b"old", DATA)
            assert [p.name for p in tmp_path.iterdir()] == ["x"]
            LocalStore(tmp_path).put("x", b"old")
            continue
        assert fs.left > 0
        assert n > 5
        break
    else:
        raise AssertionError("put never succeeded")
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("call", ["put", "head", "get_range", "list", "delete"])
def test_what_does_not_return_is_known_by_its_object(call):
    """Each call of a watched store is known while it lasts, by another thread."""
    gate, watch = threading.Event(), IoWatch()

    class Gated(MemoryStore):
        def __getattribute__(self, name):
            if name == call:
                gate.wait(20)
            return super().__getattribute__(name)

    store = WatchedStore(Gated(), watch)
    arguments = {"put": ("x", b"1"), "head": ("x",), "get_range": ("x", 0, 1), "delete": (["x"],)}
    act = {"list": lambda: list(store.list(""))}.get(
        call, lambda: getattr(store, call)(*arguments[call])
    )
    thread = threading.Thread(target=lambda: suppressed(act))
    thread.start()
    deadline = time.monotonic() + 10
    while not (found := watch.ongoing()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert found[0].path == ("memory:" if call in ("list", "delete") else "memory:/x")
    gate.set()
    thread.join()
    assert watch.ongoing() == []


def suppressed(act):
    with suppress(KeyError):
        act()
