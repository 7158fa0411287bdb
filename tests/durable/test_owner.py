"""One owner per folder, whoever dies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from paceline.durable.errors import UserError
from paceline.durable.fs import RealFileSystem
from paceline.durable.owner import LOCK, holder, owned

HOLD = (
    "import sys, time; from pathlib import Path; from paceline.durable.owner import owned\n"
    "with owned(Path(sys.argv[1]), 'paceline extract'):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def holder_process(tmp_path):
    """Another process that holds the folder `run`."""
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield folder, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_with_pid_host_and_age(holder_process):
    folder, process = holder_process
    said = rf"`paceline extract` is at work .* process {process.pid} on {os.uname().nodename}, for "
    with pytest.raises(UserError, match=said + r"\d+ seconds now"), owned(folder, "paceline train"):
        pytest.fail("two owners")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_owner_is_taken_over_and_named(holder_process, how):
    folder, process = holder_process
    process.send_signal(how)
    process.wait()
    with owned(folder, "paceline train") as died:
        assert died is not None
        assert (died.pid, died.doing) == (process.pid, "paceline extract")


def test_who_lets_go_leaves_no_trace(tmp_path):
    for _ in range(2):
        with owned(tmp_path / "run", "paceline run") as died:
            assert died is None
    with pytest.raises(KeyError), owned(tmp_path / "run", "paceline run"):
        raise KeyError
    assert (tmp_path / "run" / LOCK).read_bytes() == b""


def test_a_lock_file_of_garbage_is_only_words(tmp_path):
    (tmp_path / LOCK).write_bytes(b"\xff{")
    with (
        owned(tmp_path, "paceline run") as died,
        pytest.raises(UserError, match="`paceline run` is at work"),
        owned(tmp_path, "paceline run"),
    ):
        pytest.fail("two owners")
    assert died is None


def test_on_a_full_disk_the_lock_holds_without_words(tmp_path):
    class Full(RealFileSystem):
        def write(self, file, data):
            raise OSError(28, "No space left on device")

    with (
        owned(tmp_path, "paceline run", fs=Full()),
        pytest.raises(UserError, match="another process is at work"),
        owned(tmp_path, "paceline train"),
    ):
        pytest.fail("two owners")


def test_where_nothing_can_be_written_nothing_is_guarded(tmp_path):
    class ReadOnly(RealFileSystem):
        def open_append(self, path):
            raise OSError(30, "Read-only file system", str(path))

    with owned(tmp_path, "paceline run", fs=ReadOnly()) as died:
        assert died is None


def test_holder_tells_who_holds_a_folder_now(holder_process, tmp_path):
    folder, process = holder_process
    found = holder(folder)
    assert (found.pid, found.host, found.doing) == (
        process.pid, os.uname().nodename, "paceline extract",
    )  # fmt: skip
    process.kill()
    process.wait()
    assert holder(folder) is None, "its words are still there, and it holds nothing"
    assert holder(tmp_path) is None


def test_a_holder_without_words_is_an_error(tmp_path):
    with owned(tmp_path, "paceline run"):
        (tmp_path / LOCK).write_bytes(b"")
        with pytest.raises(UserError, match="another process is at work"):
            holder(tmp_path)


def test_looking_disturbs_nobody_who_wants_the_folder(tmp_path):
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            with contextlib.suppress(UserError):  # always met it between lock and words
                holder(tmp_path)
            time.sleep(0.001)

    threads = [threading.Thread(target=look) for _ in range(2)]
    with owned(tmp_path, "paceline run"):
        pass
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            with owned(tmp_path, "paceline run"):
                assert holder(tmp_path).doing == "paceline run"
    finally:
        ended.set()
        for thread in threads:
            thread.join()
