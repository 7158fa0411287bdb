import os
import socket
import subprocess
import sys
import time

import psutil

from paceline.durable.checksum import crc64, crc64_combine, crc64_file
from paceline.durable.fs import REAL_FS, atomic_file, remove_dead_partials, write_atomic


def test_crc64_is_the_one_that_object_stores_compute(tmp_path):
    assert crc64(b"123456789") == 0xAE8B14860A799888
    file = tmp_path / "x"
    file.write_bytes(b"123456789")
    assert crc64_file(file) == crc64(b"6789", crc64(b"12345"))
    assert crc64_combine(crc64(b"12345"), crc64(b"6789"), 4) == crc64_file(file)


def test_partials_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    (tmp_path / f"a.{int(dead.stdout)}.partial").touch()
    (tmp_path / f"b.{os.getpid()}.partial").touch()
    (tmp_path / "somebody.partial").touch()
    assert remove_dead_partials(tmp_path) == [f"a.{int(dead.stdout)}.partial"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"b.{os.getpid()}.partial", "somebody.partial",
    ]  # fmt: skip


def test_an_id_that_is_another_processs_by_now_and_a_zombie_keep_no_partial(tmp_path):
    reused = tmp_path / f"a.{os.getpid()}.partial"
    reused.touch()
    os.utime(reused, (1e9, 1e9))  # long before this process began
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    left = tmp_path / f"b.{zombie.pid}.partial"
    left.touch()
    assert remove_dead_partials(tmp_path) == [reused.name, left.name]
    zombie.wait()


def test_two_processes_never_share_a_partial(tmp_path):
    with atomic_file(tmp_path / "x") as file:
        assert str(os.getpid()) in file.name
        REAL_FS.write(file, b"1")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_partials_of_other_machines_are_left_in_a_shared_folder(tmp_path):
    with atomic_file(tmp_path / "unit"):
        (own,) = (p.name for p in tmp_path.iterdir())
    (tmp_path / "unit").unlink()
    dead = 999_999_999
    own = own.replace(f".{os.getpid()}.", f".{dead}.")
    other = f"unit.{'0' * 8}.{dead}.partial"
    old = f"unit.{dead}.partial"
    for name in (own, other, old):
        (tmp_path / name).touch()
    assert remove_dead_partials(tmp_path, is_shared=True) == sorted([own, old])
    assert remove_dead_partials(tmp_path) == [other]


def test_two_machines_may_write_one_name_of_a_shared_folder_with_one_process_id(
    tmp_path, monkeypatch
):
    path = tmp_path / "manifest.json"
    with atomic_file(path) as file:
        REAL_FS.write(file, b"one")
        with monkeypatch.context() as other_machine:
            other_machine.setattr(socket, "gethostname", lambda: "another")
            write_atomic(path, b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
