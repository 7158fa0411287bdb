import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.crash import Crashed, CrashFs, FaultyFs, UnsyncedFs, restore
from paceline.durable.fs import write_atomic
from torture_commit import (
    Build,
    HastyStagedDepot,
    NoFolderSync,
    NoSync,
    crash_everywhere,
    fail_everywhere,
    hasty_local_depot,
    small_units,
)


def test_unsynced_bytes_are_lost_kept_or_torn(tmp_path):
    fs = CrashFs(tmp_path)
    with fs.open_new(tmp_path / "a") as file:
        fs.sync_dir(tmp_path)
        fs.write(file, b"durable ")
        fs.sync(file)
        fs.write(file, b"not")
        assert fs.disk("none") == {".": None, "a": b"durable "}
        assert fs.disk("all") == {".": None, "a": b"durable not"}
        seen = {fs.disk(seed)["a"] for seed in range(100)}
    assert {b"durable ", b"durable not", b"durable no", b"durable \0\0\0"} <= seen
    assert all(data is not None and data.startswith(b"durable ") for data in seen)


def test_a_name_is_durable_only_after_its_folder_was_synced(tmp_path):
    fs = CrashFs(tmp_path)
    with fs.open_new(tmp_path / "a") as file:
        fs.write(file, b"1")
        fs.sync(file)
    assert "a" not in fs.disk("none")
    fs.sync_dir(tmp_path)
    fs.replace(tmp_path / "a", tmp_path / "b")
    assert fs.disk("none") == {".": None, "a": b"1"}
    assert fs.disk("all") == {".": None, "b": b"1"}
    fs.sync_dir(tmp_path)
    fs.unlink(tmp_path / "b")
    assert fs.disk("none") == {".": None, "b": b"1"}
    assert fs.disk("all") == {".": None}


def test_a_replaced_file_is_the_old_or_the_new_one_never_a_mixture(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    for k in range(20):
        fs = CrashFs(tmp_path, crash_after=k)
        (tmp_path / "x").write_bytes(b"old")
        try:
            write_atomic(tmp_path / "x", b"new content", fs=fs)
        except Crashed:
            for keep in ("none", "all", *range(20)):
                assert fs.disk(keep)["x"] in (b"old", b"new content")
        else:
            assert fs.disk("none")["x"] == b"new content"
            break
    else:
        raise AssertionError("never came to its end")
    assert fs.calls == k


def test_truncation_is_durable_and_appending_goes_on_there(tmp_path):
    (tmp_path / "j").write_bytes(b"12345")
    fs = CrashFs(tmp_path)
    with fs.open_append(tmp_path / "j") as file:
        fs.write(file, b"67")
        fs.truncate(tmp_path / "j", 3)
        assert fs.disk("none")["j"] == b"123"
        fs.write(file, b"ab")
        assert fs.disk("none")["j"] == b"123"
        assert fs.disk("all")["j"] == b"123ab" == (tmp_path / "j").read_bytes()


def test_after_the_crash_nothing_goes(tmp_path):
    fs = CrashFs(tmp_path, crash_after=1)
    file = fs.open_new(tmp_path / "a")
    with file:
        for call in (
            lambda: fs.write(file, b"1"),
            lambda: fs.sync(file),
            lambda: fs.lock(file),
            lambda: fs.make_dirs(tmp_path / "d"),
            lambda: fs.unlink(tmp_path / "a"),
        ):
            with pytest.raises(Crashed):
                call()
    assert (tmp_path / "a").read_bytes() == b""


@given(seed=st.integers(0, 10**6))
def test_with_everything_kept_the_disk_is_what_the_program_saw(tmp_path_factory, seed):
    root = tmp_path_factory.mktemp("disk")
    rng = random.Random(seed)
    fs = CrashFs(root)
    for _ in range(12):
        path = root / rng.choice("abc")
        match rng.randrange(5):
            case 0:
                write_atomic(path, rng.randbytes(rng.randrange(50)), fs=fs)
            case 1:
                with fs.open_append(path) as file:
                    fs.write(file, rng.randbytes(9))
            case 2:
                fs.unlink(path)
            case 3 if path.exists():
                fs.truncate(path, rng.randrange(20))
            case 4 if path.exists():
                fs.replace(path, root / rng.choice("abc"))
    seen = {p.name: p.read_bytes() for p in root.iterdir()}
    assert fs.disk("all") == {".": None, **seen}
    fs.sync_dir(root)
    assert set(fs.disk("none")) == set(fs.disk("all"))
    other = root.with_name(root.name + "-restored")
    restore(fs.disk("all"), other)
    assert {p.name: p.read_bytes() for p in other.iterdir()} == seen


@pytest.mark.parametrize("forever", [False, True])
def test_a_faulty_disk_fails_the_call_that_was_asked_for(tmp_path, forever):
    fs = FaultyFs(UnsyncedFs(), fail_at=2, error=errno.ENOSPC, forever=forever)
    with fs.open_append(tmp_path / "a") as file:
        with pytest.raises(OSError, match="No space left") as caught:
            fs.write(file, b"1234")
        assert caught.value.errno == errno.ENOSPC
        assert (tmp_path / "a").read_bytes() == b"12"
        if forever:
            with pytest.raises(OSError, match="No space left"):
                fs.sync(file)
        else:
            fs.sync(file)
    assert fs.calls == 3


def test_a_crash_after_every_call_of_a_commit_never_leaves_a_false_done(tmp_path):
    found = crash_everywhere(tmp_path / "site", keeps=("none", "all", 1, 2))
    print(found.calls, found.cases, found.outcomes)
    assert found.false_dones == []
    assert found.unclean == []
    assert all(calls > 8 for calls in found.calls.values())
    assert found.cases == sum(4 * (calls + 1) for calls in found.calls.values())
    assert found.outcomes["recovered"] > 20, "staged units are uploaded, not made again"


def test_two_units_in_one_journal_survive_crashes_too(tmp_path):
    found = crash_everywhere(tmp_path / "site", units=small_units(2), keeps=(7,), stride=3)
    assert (found.false_dones, found.unclean) == ([], [])


@pytest.mark.parametrize(("kind", "begin"), [("local", 7), ("staged-local", 25)])
@pytest.mark.parametrize("disk", [NoSync, NoFolderSync])
def test_sabotage_without_syncs_is_found_by_the_crash_simulator(tmp_path, kind, begin, disk):
    found = crash_everywhere(
        tmp_path / "site",
        kinds=[kind],
        keeps=("none", *range(16)),
        build=Build(disk=disk),
        begin=begin,
        is_enough=True,
    )
    assert found.false_dones


def test_sabotage_recording_before_the_rename_is_found(tmp_path):
    build = Build(local=hasty_local_depot(small_units()))
    assert crash_everywhere(
        tmp_path / "site", kinds=["local"], keeps=("all",), build=build, is_enough=True
    ).false_dones


@pytest.mark.parametrize("kind", ["staged-local", "staged-memory"])
def test_sabotage_recording_before_the_upload_is_found(tmp_path, kind):
    found = crash_everywhere(
        tmp_path / "site",
        kinds=[kind],
        keeps=("all",),
        build=Build(staged=HastyStagedDepot),
        is_enough=True,
    )
    assert found.false_dones


@pytest.mark.parametrize("kind", ["local", "staged-local", "staged-memory"])
@pytest.mark.parametrize("mode", ["once", "forever", "block"])
def test_a_failing_call_of_a_commit_never_leaves_a_false_done(tmp_path, kind, mode):
    stride = 4 if mode == "block" else 2
    found = fail_everywhere(tmp_path / "site", kinds=[kind], modes=[mode], stride=stride)
    print(found.calls, found.cases, found.outcomes)
    assert found.false_dones == []
    assert found.unclean == []
    if mode == "block":
        assert found.outcomes["hangs"] > 2
        assert kind != "staged-local" or found.outcomes["StorageRefused"] > 0
