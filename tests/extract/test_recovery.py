import os
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from paceline.durable.errors import Interrupted, storage_refused
from paceline.durable.session import end_record, session_record
from paceline.extract import recovery
from paceline.extract.recovery import Standing, recovery_report
from paceline.watch.events import Counts, EventWriter

STANDING = Standing(
    units=74,
    units_total=400,
    samples=18_421,
    bytes=4_610_000_000,
    tokens=100_000,
    tokens_total=1_000_000,
    staged_units=3,
    staged_bytes=190_000_000,
)


class Memory(NamedTuple):
    available: int
    total: int


class Mount(NamedTuple):
    kind: str


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    monkeypatch.setattr(recovery.psutil, "virtual_memory", lambda: Memory(90 * 10**9, 100 * 10**9))


@pytest.fixture
def session():
    return {**session_record([], {}), "boot_id": "boot-1", "oom_kills": 4}


def report(records, events, standing=STANDING, **more):
    asked = {"boot_id": "boot-1", "oom_kills": 4, "paths": {}} | more
    return recovery_report(records, events, standing, **asked)


def emit(folder, *kinds, rate=50.0, **fields):
    with EventWriter(folder, "extract") as events:
        for kind in kinds:
            events.emit(kind, Counts(unit="samples", tokens=5, tokens_total=9, rate=rate), **fields)


def test_a_first_start_and_a_finished_one_have_nothing_to_tell(tmp_path, session):
    assert report([], tmp_path).lines == ()
    assert report([{"kind": "verified"}], tmp_path).ending == "none"
    done = report([session, end_record("finished")], tmp_path)
    assert (done.lines, done.was_unclean, done.ending) == ((), False, "finished")


def test_only_the_last_session_counts(tmp_path, session):
    records = [session, end_record("failed", "x"), session, end_record("finished")]
    assert report(records, tmp_path).ending == "finished"
    records = [session, end_record("finished"), session, {"kind": "verified"}]
    assert report(records, tmp_path).ending == "killed"


def test_what_survived_and_how_long_the_rest_takes(tmp_path, session):
    emit(tmp_path, "start", "progress", rate=2500.0)
    lines = report([session], tmp_path, now=time.time() + 7200).lines
    assert "74 of 400 shards, verified: 18,421 samples, 4.61 GB." in lines[1]
    assert lines[2].startswith("3 shards more (190.00 MB) had been made")
    assert lines[-1] == "900,000 tokens are left: 6 min 00 s at its last 2,500 tokens/s."
    assert "last heard of 2 h 00 min ago." in lines[0]


def test_nothing_survived(tmp_path, session):
    nothing = Standing(units=0, units_total=9, samples=0, bytes=0, tokens=0, tokens_total=10)
    records = [session, end_record("failed", "x")]
    assert report(records, tmp_path, nothing).lines[1:] == (
        "None of its 9 shards is verified.",
        "10 tokens are left; no event tells how fast they go.",
    )


def test_a_run_that_was_killed_before_it_made_anything_leaves_the_rate_of_the_one_before(
    tmp_path, session
):
    emit(tmp_path, "start", "progress", rate=2500.0)
    emit(tmp_path, "start", rate=None)
    later = {**session, "at": time.time() + 100, "pid": 1}
    lines = report([session, later], tmp_path).lines
    assert lines[-1] == (
        "900,000 tokens are left: 6 min 00 s at the 2,500 tokens/s of a run before it."
    )


def test_who_may_have_killed_it_is_where_to_look(tmp_path, session):
    assert any("journalctl -k" in line for line in report([session], tmp_path).lines)
    stopped = [session, end_record("interrupted", "SIGTERM")]
    assert not any("journalctl" in line for line in report(stopped, tmp_path).lines)


def test_a_signal_is_a_clean_end_and_told(tmp_path, session):
    found = report([session, end_record("interrupted", "SIGTERM")], tmp_path)
    assert not found.was_unclean
    assert "was stopped by a signal" in found.lines[0]


def test_an_error_is_told_in_its_words(tmp_path, session):
    found = report([session, end_record("failed", "all workers died.")], tmp_path)
    assert (found.was_unclean, found.ending) == (True, "failed")
    assert "ended with an error: all workers died." in found.lines[0]


def test_a_full_disk_is_told_with_the_room_there_is_now(tmp_path, session):
    error = str(storage_refused(OSError(28, os.strerror(28), str(tmp_path))))
    found = report([session, end_record("failed", error)], tmp_path, paths={"the run": tmp_path})
    assert found.ending == "no_room"
    assert "because there was no room left" in found.lines[0]
    assert any(
        line.startswith(f"{tmp_path} (the run): ") and line.endswith(" are free now.")
        for line in found.lines
    )


def test_a_journal_without_room_for_its_end_is_made_up_for_by_the_events(tmp_path, session):
    with pytest.raises(OSError), EventWriter(tmp_path, "extract"):  # noqa: PT011
        raise OSError(28, os.strerror(28))
    assert report([session], tmp_path).ending == "no_room"
    with pytest.raises(Interrupted), EventWriter(tmp_path, "extract"):
        raise Interrupted("stopped")
    assert report([session], tmp_path).ending == "interrupted"


def test_events_of_other_processes_and_sessions_tell_nothing(tmp_path, session):
    emit(tmp_path, "failed", error="x")
    assert report([{**session, "pid": 1}], tmp_path).ending == "killed"
    assert report([{**session, "at": time.time() + 100}], tmp_path).ending == "killed"
    (tmp_path / "extract.jsonl").unlink()
    (tmp_path / "extract.jsonl").mkdir()
    assert report([session], tmp_path).ending == "killed"


def test_incident_a_machine_that_was_started_anew_is_recognised(tmp_path, session):
    found = report([session], tmp_path, boot_id="boot-2", oom_kills=9)
    assert found.ending == "reboot"
    assert "started anew since" in found.lines[0]
    assert any("paceline doctor" in line for line in found.lines)


def test_another_machine_is_told(tmp_path, session):
    found = report([{**session, "host": "elsewhere"}], tmp_path)
    assert found.ending == "other_machine"
    assert "on elsewhere" in found.lines[0]
    assert socket.gethostname() not in found.lines[0]


@pytest.mark.parametrize(
    ("before", "after", "ending"),
    [(4, 5, "out_of_memory"), (4, 4, "killed"), (None, 5, "killed"), (4, None, "killed"),
     (4, 0, "killed")],
)  # fmt: skip
def test_death_for_want_of_memory_is_told_from_others(tmp_path, session, before, after, ending):
    found = report([{**session, "oom_kills": before}], tmp_path, oom_kills=after)
    assert (found.ending, found.was_unclean) == (ending, True)
    told = any("90.00 GB of 100.00 GB are available" in line for line in found.lines)
    assert told == (ending == "out_of_memory")


def test_workers_that_died_for_want_of_memory_are_no_mere_error(tmp_path, session):
    found = report([session, end_record("failed", "worker 1 died")], tmp_path, oom_kills=6)
    assert found.ending == "out_of_memory"
    assert "It said: worker 1 died" in found.lines[0]


def test_little_memory_is_told_whatever_happened(tmp_path, session, monkeypatch):
    monkeypatch.setattr(recovery.psutil, "virtual_memory", lambda: Memory(5 * 10**9, 100 * 10**9))
    assert any("5.00 GB of 100.00 GB" in line for line in report([session], tmp_path).lines)


def test_what_it_waited_for_is_told(tmp_path, session):
    emit(tmp_path, "progress", waiting={"kind": "space", "reason": "/x is 81 % full", "since": 1})
    assert "ago, waiting: /x is 81 % full." in report([session], tmp_path).lines[0]
    emit(tmp_path, "progress", waiting=None)
    assert "waiting" not in report([session], tmp_path).lines[0]


def test_too_little_room_for_what_is_left_is_told_before_it_runs_full(tmp_path, session):
    found = report([session], tmp_path, paths={"the features": tmp_path}, bytes_left=10**18)
    assert any("It will run full again unless room is made." in line for line in found.lines)


def test_places_that_a_reboot_empties_are_told(tmp_path, session, monkeypatch):
    for kind, words in (("tmpfs", "the next reboot empties it"), ("overlay", "inside a container")):
        monkeypatch.setattr(recovery, "mount_of", lambda path, kind=kind: Mount(kind))
        found = report([session], tmp_path, paths={"the target": tmp_path})
        assert any(words in line and "(the target)" in line for line in found.lines)

    def unknown(path):
        raise OSError("no table")

    monkeypatch.setattr(recovery, "mount_of", unknown)
    found = report([session], tmp_path, paths={"the target": tmp_path})
    assert any("cannot be looked at: no table" in line for line in found.lines)


def test_the_report_knows_no_torch():
    program = "import sys, paceline.extract.recovery; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
