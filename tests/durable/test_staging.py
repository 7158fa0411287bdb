import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.durable.checksum import crc64
from paceline.durable.errors import UserError
from paceline.durable.fs import REAL_FS, atomic_file
from paceline.durable.iowatch import IoWatch
from paceline.durable.run_id import RUN_ID, claim_run_id, read_run_id
from paceline.durable.staging import (
    Staging,
    boot_id,
    choose_staging,
    clear_leftovers,
    leftovers,
    open_stagings,
    staging_limit,
    staging_root,
)
from paceline.durable.store import Stat
from small_disks import small_disk


def run_dir(tmp_path: Path, name: str = "run") -> Path:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    return path


def put(staging: Staging, key: str, data: bytes = b"12345") -> Stat:
    with atomic_file(staging.path(key)) as file:
        REAL_FS.write(file, data)
    return Stat(len(data), crc64(data))


DYING = """
import os, sys
from pathlib import Path
from paceline.durable.staging import Staging
staging = Staging(Path(sys.argv[1]), Path(sys.argv[2]))
staging.path("unit-0").write_bytes(bytes(100_000))
os._exit(9)
"""


def dead_run(folder: Path, run: Path) -> Path:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, str(folder), str(run)]
    assert subprocess.run(command, env=env, check=False).returncode == 9
    return staging_root(folder, run)


def test_a_folder_says_whose_it_is_and_goes_away_when_empty(tmp_path):
    run = run_dir(tmp_path)
    staging = Staging(tmp_path / "shm", run)
    words = msgspec.json.decode((staging.root / "staging.json").read_bytes())
    assert words == {
        "run_root": str(run),
        "host": os.uname().nodename,
        "boot_id": boot_id(),
        "run_id": (run / RUN_ID).read_text(),
        "lies_in": f"{tmp_path.stat().st_dev}:{tmp_path.stat().st_ino}",
    }
    assert len(boot_id()) == 36
    stat = put(staging, "features/f00d/unit-0")
    staging.close()
    assert staging.path("features/f00d/unit-0").stat().st_size == stat.size, "content stays"
    again = Staging(tmp_path / "shm", run)
    assert again.root == staging.root, "the run finds its own"
    again.discard("features/f00d/unit-0")
    again.close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_start_killed_while_it_wrote_its_words_leaves_no_folder_for_ever(tmp_path):
    run = run_dir(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    claim_run_id(run)
    root = staging_root(tmp_path / "shm", run)
    root.mkdir(parents=True)
    (root / f"staging.json.{ended.pid}.partial").write_bytes(b'{"run')
    Staging(tmp_path / "shm", run).close()
    assert not root.exists()


def test_a_second_process_is_refused(tmp_path):
    run = run_dir(tmp_path)
    staging = Staging(tmp_path / "shm", run)
    with pytest.raises(UserError, match=f"staging of {run}"):
        Staging(tmp_path / "shm", run)
    staging.close()
    Staging(tmp_path / "shm", run).close()


def test_two_runs_do_not_meet(tmp_path):
    one, two = (Staging(tmp_path / "shm", run_dir(tmp_path, n)) for n in ("a", "b"))
    assert one.path("unit-0") != two.path("unit-0")
    one.close()
    two.close()


def test_a_run_has_one_id_for_ever_and_looking_makes_none(tmp_path):
    run = run_dir(tmp_path)
    assert read_run_id(run) == read_run_id(tmp_path / "absent") == ""
    nobodys = staging_root(tmp_path, run)
    assert list(run.iterdir()) == []
    found = claim_run_id(run)
    assert len(found) == 32
    assert claim_run_id(run) == read_run_id(run) == found
    assert staging_root(tmp_path, run) != nobodys
    assert claim_run_id(run_dir(tmp_path, "other")) != found
    with pytest.raises(NotADirectoryError):
        read_run_id(run / RUN_ID)


def test_a_boot_and_another_host_name_leave_a_run_its_staging(tmp_path, monkeypatch):
    run = run_dir(tmp_path)
    staging = Staging(tmp_path / "disk", run)
    stat = put(staging, "unit-0")
    staging.close()
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    monkeypatch.setattr("paceline.durable.staging.boot_id", lambda: "another")
    monkeypatch.setattr("paceline.durable.staging._folder_of", lambda root: "7:7")
    assert clear_leftovers(tmp_path / "disk", run) == ([], [])
    again = Staging(tmp_path / "disk", run)
    assert again.recover({"unit-0": stat}).kept == {"unit-0": stat}
    again.close()


def test_a_copy_of_a_run_and_a_run_in_its_place_have_staging_of_their_own(tmp_path):
    run, shm = run_dir(tmp_path), tmp_path / "shm"
    first = Staging(shm, run)
    put(first, "unit-0")
    first.close()
    shutil.copytree(run, tmp_path / "copy")
    copied = Staging(shm, tmp_path / "copy")
    assert not copied.path("unit-0").exists()
    copied.close()
    assert clear_leftovers(shm, tmp_path / "copy")[0] == [], "its run is there"
    shutil.rmtree(run)
    run.mkdir()
    removed, named = clear_leftovers(shm, run)
    assert ([left.path for left in removed], named) == ([first.root], [])
    assert list(shm.iterdir()) == []


CONTAINER = """
import sys
from pathlib import Path
from paceline.durable.staging import Staging, clear_leftovers
shm, run = map(Path, sys.argv[1:])
removed, named = clear_leftovers(shm, run)
assert removed == [], removed
staging = Staging(shm, run)
print(len(named), staging.root.name, staging.recover({}).removed)
if run.joinpath("stay").exists():
    staging.path("unit-0").write_bytes(b"made here")
staging.close()
"""


def test_two_containers_of_equal_paths_and_one_shared_memory_do_not_meet(tmp_path):
    """Each sees its own folder at the run's path; host name and path are the same in both."""
    shm, point = tmp_path / "shm", run_dir(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def in_container(root: Path) -> list[str]:
        script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, "sh", str(root), str(point)]
        inside = [sys.executable, "-c", CONTAINER, str(shm), str(point)]
        done = subprocess.run(
            [*command, *inside], env=env, capture_output=True, text=True, check=False
        )
        if "unshare" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return done.stdout.split(maxsplit=2)

    one, two = run_dir(tmp_path, "one"), run_dir(tmp_path, "two")
    (one / "stay").touch()
    named, first, removed = in_container(one)
    assert (named, removed.strip()) == ("0", "{}")
    named, second, removed = in_container(two)
    assert (named, removed.strip()) == ("1", "{}"), "named, and neither removed nor taken over"
    assert first != second
    named, again, removed = in_container(one)
    assert again == first
    assert removed.strip() == "{'unit-0': 'not recorded as waiting'}", "it finds its own again"


def test_each_read_of_what_is_staged_is_known_to_the_watch(tmp_path):
    calls = []

    class Noting(IoWatch):
        def call(self, what, path=""):
            calls.append((what, Path(path).name))
            return super().call(what, path)

    staging = Staging(tmp_path / "shm", run_dir(tmp_path), watch=Noting())
    stat = put(staging, "unit-0", bytes(20 << 20))
    assert staging.recover({"unit-0": stat}).kept == {"unit-0": stat}
    staging.close()
    # To open it, three blocks of 8 MiB at most, and its end.
    assert calls == [("list", "units"), ("look at", "unit-0"), *[("read", "unit-0")] * 5]


def test_keys_cannot_leave_the_folder(tmp_path):
    staging = Staging(tmp_path / "shm", run_dir(tmp_path))
    for key in ("../x", "/etc/passwd", "unit.partial"):
        with pytest.raises(ValueError, match="is not a key"):
            staging.path(key)
    staging.close()


def test_discard_removes_what_is_half_written_too_and_nothing_else(tmp_path):
    staging = Staging(tmp_path / "shm", run_dir(tmp_path))
    for name in ("unit-1", "unit-1.4711.partial", "unit-10", "unit-10.4711.partial"):
        (staging.path("unit-1").parent / name).write_bytes(b"1")
    staging.discard("unit-1")
    staging.discard("unit-1")
    assert sorted(p.name for p in staging.path("unit-1").parent.iterdir()) == [
        "unit-10",
        "unit-10.4711.partial",
    ]
    staging.close()


def test_only_what_the_journal_promises_and_the_bytes_confirm_is_kept(tmp_path):
    staging = Staging(tmp_path / "shm", run_dir(tmp_path))
    good = put(staging, "a/good", b"good")
    promised = {"a/good": good, "a/gone": good}
    for key, data in (("short", b"x"), ("flipped", b"goop"), ("unknown", b"good")):
        put(staging, f"a/{key}", data)
        if key != "unknown":
            promised[f"a/{key}"] = good
    staging.path("a/good").with_name("good.1.partial").write_bytes(b"go")
    staging.path("a/link").symlink_to("/etc/passwd")
    promised["a/link"] = good
    found = staging.recover(promised)
    assert found.kept == {"a/good": good}
    assert found.removed == {
        "a/short": "1 bytes, not the recorded 4",
        "a/flipped": "its checksum does not hold",
        "a/unknown": "not recorded as waiting",
        "a/good.1.partial": "half-written",
        "a/link": "a link",
    }
    assert [p.name for p in staging.path("a/good").parent.iterdir()] == ["good"]
    assert Path("/etc/passwd").exists()
    staging.close()


def test_leftovers_name_live_dead_and_orphaned_runs(tmp_path):
    shm = tmp_path / "shm"
    runs = {name: run_dir(tmp_path, name) for name in ("own", "live", "dead", "gone", "far")}
    live = Staging(shm, runs["live"])
    own = Staging(shm, runs["own"])
    roots = {name: dead_run(shm, runs[name]) for name in ("dead", "gone", "far")}
    roots |= {"live": live.root, "own": own.root}
    for name in ("gone", "far"):
        shutil.rmtree(runs[name])
    words = roots["far"] / "staging.json"
    words.write_bytes(words.read_bytes().replace(os.uname().nodename.encode(), b"elsewhere"))
    (shm / "paceline-notes.txt").write_text("a user's own file")
    (shm / "paceline-odd").mkdir()
    (shm / "paceline-odd" / "staging.json").write_text("{}")

    found = {left.path: left for left in leftovers(shm)}
    assert set(found) == {*roots.values(), shm / "paceline-odd"}
    assert {n for n, p in roots.items() if found[p].is_live} == {"live", "own"}
    assert {n for n, p in roots.items() if found[p].is_orphan} == {"gone"}
    assert found[roots["dead"]].run_root == runs["dead"]
    assert found[shm / "paceline-odd"].run_root is None
    assert found[roots["dead"]].bytes >= 100_000

    removed, named = clear_leftovers(shm, runs["own"])
    assert [left.path for left in removed] == [roots["gone"]]
    assert {left.path for left in named} == {roots["dead"], roots["far"], shm / "paceline-odd"}
    assert not roots["gone"].exists()
    assert live.root.is_dir()
    assert (shm / "paceline-notes.txt").exists()
    assert leftovers(tmp_path / "absent") == []
    live.close()
    own.close()


def test_auto_takes_shared_memory_where_half_of_it_is_enough(tmp_path):
    mine = tmp_path / "run" / "staging"
    with small_disk(tmp_path / "shm", 4 << 20) as shm:
        assert choose_staging("auto", mine, 2 << 20, shared=shm) == shm
        assert choose_staging("auto", mine, (2 << 20) + 1, shared=shm) == mine
        (shm / "others").write_bytes(bytes(2 << 20))
        assert choose_staging("auto", mine, 2 << 20, shared=shm) == mine
        assert choose_staging("/data/x", mine, 1, shared=shm) == Path("/data/x")
        assert staging_limit(None, shm) == 1 << 20
        assert staging_limit(12, shm) == 12


def test_auto_never_takes_a_disk_or_nothing_for_memory(tmp_path):
    mine = tmp_path / "run" / "staging"
    assert choose_staging("auto", mine, 1, shared=tmp_path / "absent") == mine
    assert choose_staging("auto", mine, 1, shared=Path("/proc")) == mine


def test_shared_memory_falls_back_on_the_run_and_the_run_on_what_is_left_there(tmp_path):
    run, shm = run_dir(tmp_path), tmp_path / "shm"
    first, fallback = open_stagings(shm, run / "staging", run, shared=shm)
    assert first.root.parent == shm
    assert fallback is not None
    assert fallback.root.parent == run / "staging"
    put(first, "unit-0")
    first.close()
    fallback.close()
    first, fallback = open_stagings(run / "staging", run / "staging", run, shared=shm)
    assert first.root.parent == run / "staging"
    assert fallback is not None
    assert fallback.path("unit-0").exists()
    fallback.discard("unit-0")
    first.close()
    fallback.close()
    first, fallback = open_stagings(run / "staging", run / "staging", run, shared=shm)
    assert fallback is None
    first.close()
