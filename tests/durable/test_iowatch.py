import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.durable import iowatch
from paceline.durable.fs import REAL_FS, FileSystem, atomic_file
from paceline.durable.iowatch import FreezeWatch, IoWatch, WatchedFs, process_state


def _until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_goes_on_before_and_after_a_call_and_errors_pass():
    watch = IoWatch()
    assert watch.ongoing() == []
    with watch.call("write", Path("/x")):
        (call,) = watch.ongoing()
        assert (call.what, call.path) == ("write", "/x")
        assert call.thread_id == threading.get_native_id()
        assert watch.ongoing(older_than=10.0) == []
    with pytest.raises(FileNotFoundError):
        WatchedFs(REAL_FS, watch).truncate(Path("/no/such/file"), 0)
    assert watch.ongoing() == []


def test_of_nested_calls_the_innermost_is_told_and_its_end_is_a_sign_of_life():
    watch = IoWatch()
    with watch.call("record", "unit"):
        time.sleep(0.05)
        with watch.call("sync", "journal"):
            time.sleep(0.03)
            (call,) = watch.ongoing()
            assert call.what == "sync"
            assert call.seconds < 0.05
        (call,) = watch.ongoing()
        assert call.what == "record"
        assert call.seconds < 0.03


def test_a_blocked_write_and_a_blocked_open_are_seen_from_another_thread(tmp_path: Path):
    """Real calls that do not return: a full pipe, a FIFO without a reader."""
    watch = IoWatch()
    fs = WatchedFs(REAL_FS, watch)
    read, write = os.pipe()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe = os.fdopen(write, "wb", buffering=0)

    def open_fifo() -> None:
        fs.open_append(fifo).close()

    threads = [
        threading.Thread(target=fs.write, args=(pipe, bytes(1 << 20)), daemon=True),
        threading.Thread(target=open_fifo, daemon=True),
    ]
    for thread in threads:
        thread.start()
    _until(lambda: len(watch.ongoing(0.1)) == 2)
    calls = {call.what: call for call in watch.ongoing(0.1)}
    assert calls["open"].path == str(fifo)
    assert calls["write"].path == str(write)
    assert calls["open"].thread_id == threads[1].native_id
    assert all(process_state(os.getpid(), call.thread_id) == "S" for call in calls.values())
    reader = fifo.open("rb")
    with os.fdopen(read, "rb") as file:
        assert len(file.read(1 << 20)) == 1 << 20
    for thread in threads:
        thread.join(5)
    reader.close()
    pipe.close()
    assert watch.ongoing() == []


def test_every_call_of_the_seam_is_watched_and_does_what_it_says(tmp_path: Path):
    seen: list[tuple[str, str]] = []

    class Seen(IoWatch):
        def call(self, what: str, path: Path | str = ""):
            seen.append((what, Path(path).name.split(".")[0]))
            return super().call(what, path)

    fs: FileSystem = WatchedFs(REAL_FS, Seen())
    path = tmp_path / "new" / "unit"
    with atomic_file(path, fs=fs) as file:
        fs.write(file, b"12345")
    assert seen == [
        ("make folder", "new"),
        ("open", "unit"),
        ("write", "unit"),
        ("sync", "unit"),
        ("rename", "unit"),
        ("sync", "new"),
    ]
    seen.clear()
    with fs.open_append(path) as file:
        assert fs.lock(file)
        assert fs.is_at(file, path)
    fs.truncate(path, 3)
    assert path.read_bytes() == b"123"
    fs.unlink(path)
    assert not path.exists()
    assert [what for what, _ in seen] == ["open", "lock", "stat", "truncate", "remove"]
    public = {name for name in vars(FileSystem) if not name.startswith("_")}
    assert public <= set(vars(WatchedFs))


def _proc(root: Path, pid: int, threads: dict[int, tuple[str, int]]) -> None:
    for tid, (state, wakings) in threads.items():
        folder = root / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{tid} (a (b) c) {state} 1 2 3\n")
        (folder / "status").write_text(
            f"Name:\tx\nvoluntary_ctxt_switches:\t{wakings}\nnonvoluntary_ctxt_switches:\t7\n"
        )


def test_the_state_of_a_process_is_d_where_any_thread_is_frozen(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(iowatch, "_PROC", tmp_path)
    _proc(tmp_path, 50, {50: ("S", 1), 51: ("D", 1)})
    assert process_state(50) == "D"
    assert (process_state(50, 50), process_state(50, 51), process_state(50, 52)) == ("S", "D", "")
    _proc(tmp_path, 50, {51: ("R", 1)})
    assert process_state(50) == "S"
    assert process_state(49) == ""


def test_frozen_is_who_is_never_woken_not_who_reads_from_a_slow_disk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(iowatch, "_PROC", tmp_path)
    _proc(tmp_path, 50, {50: ("D", 1)})
    freeze = FreezeWatch(50)
    assert freeze.seconds() == 0.0
    time.sleep(0.02)
    assert freeze.seconds() >= 0.02
    _proc(tmp_path, 50, {50: ("D", 2)})  # woken in between
    assert freeze.seconds() == 0.0
    time.sleep(0.01)
    assert freeze.seconds() > 0.0
    _proc(tmp_path, 50, {50: ("R", 2)})
    assert freeze.seconds() == 0.0
    assert freeze.seconds() == 0.0
    assert FreezeWatch(49).seconds() == 0.0
