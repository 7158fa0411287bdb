import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.errors import IntegrityError, JournalDamaged, UserError
from paceline.durable.fs import RealFileSystem
from paceline.durable.journal import Journal, fold, record_at

RECORDS = [{"kind": "verified", "unit": i, "note": "ä\n" * i} for i in range(5)]


def written(path: Path, records=RECORDS) -> bytes:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def test_records_come_back_in_order_with_version_and_number(tmp_path):
    path = tmp_path / "made" / "on" / "demand" / "journal.jsonl"
    written(path)
    with Journal(path) as journal:
        assert journal.records == tuple(
            {"v": 1, "seq": i, **record} for i, record in enumerate(RECORDS)
        )
        journal.append({"kind": "more"})
        assert journal.records[-1] == {"v": 1, "seq": 5, "kind": "more"}
    assert len(fold(path.read_bytes(), path).records) == 6


@pytest.mark.parametrize("lost", range(1, 40))
def test_a_torn_tail_is_cut_durably_and_appending_goes_on(tmp_path, lost):
    path = tmp_path / "journal.jsonl"
    data = written(path)
    last = len(data.splitlines(keepends=True)[-1])
    path.write_bytes(data[:-lost])
    with Journal(path) as journal:
        assert [r["unit"] for r in journal.records] == [0, 1, 2, 3]
        assert path.stat().st_size == len(data) - last
        journal.append(RECORDS[4])
    assert path.read_bytes() == data


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_was_removed_takes_no_more_records(tmp_path, replaced):
    """Its folder may be another command's by now."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(RECORDS[0])
        path.unlink()
        if replaced:
            written(path, RECORDS[1:2])
        before = path.read_bytes() if replaced else None
        with pytest.raises(IntegrityError, match="removed or replaced while this command ran"):
            journal.append(RECORDS[1])
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_tail_of_several_torn_lines_is_cut(tmp_path):
    path = tmp_path / "journal.jsonl"
    data = written(path)
    path.write_bytes(data + b"\0" * 5000 + b"\n\n0badc0de {}\nhalf")
    with Journal(path) as journal:
        assert len(journal.records) == 5
    assert path.read_bytes() == data


@pytest.mark.parametrize("line", range(4))
def test_a_bad_line_followed_by_good_ones_is_refused_by_file_and_line(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    lines = written(path).splitlines(keepends=True)
    lines[line] = lines[line].replace(b"verified", b"verifier")
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalDamaged, match=rf"journal\.jsonl, line {line + 1} "):
        Journal(path)
    assert path.read_bytes() == b"".join(lines), "nothing may be cut from a damaged journal"


def test_a_lost_line_shows_as_a_gap(tmp_path):
    path = tmp_path / "journal.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(JournalDamaged, match="line 2 has number 2, not 1"):
        Journal(path)


def test_another_format_version_is_refused_not_cut(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, [{"v": 2}])
    with pytest.raises(IntegrityError, match="format version 2"):
        Journal(path)
    assert path.stat().st_size > 0


@given(st.data())
def test_bit_rot_never_yields_a_record_that_was_not_written(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("rot") / "journal.jsonl"
    good = written(path)
    records = fold(good, path).records
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        found = fold(bytes(flipped), path).records
    except JournalDamaged:
        return
    assert found == records[: len(found)]
    assert len(found) < len(records)


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path), pytest.raises(UserError, match="another process"):
        Journal(path)
    Journal(path).close()


class FullDisk(RealFileSystem):
    """Writes half of the data and fails, while `full`."""

    full = False
    frozen = False

    def write(self, file, data):
        if not self.full:
            return super().write(file, data)
        super().write(file, memoryview(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    def truncate(self, path, size):
        if self.frozen:
            raise OSError(5, "Input/output error")
        super().truncate(path, size)


def test_a_failed_append_leaves_the_journal_as_it_was(tmp_path):
    path = tmp_path / "journal.jsonl"
    fs = FullDisk()
    with Journal(path, fs=fs) as journal:
        journal.append({"n": 0})
        before = path.read_bytes()
        fs.full = True
        with pytest.raises(OSError, match="No space"):
            journal.append({"n": 1})
        assert path.read_bytes() == before
        assert len(journal.records) == 1
        fs.full = False
        journal.append({"n": 1})
    with Journal(path) as journal:
        assert [r["n"] for r in journal.records] == [0, 1]


def test_after_a_half_write_that_cannot_be_undone_nothing_more_is_written(tmp_path):
    path = tmp_path / "journal.jsonl"
    fs = FullDisk()
    with Journal(path, fs=fs) as journal:
        journal.append({"n": 0})
        fs.full = fs.frozen = True
        with pytest.raises(OSError, match="Input/output"):
            journal.append({"n": 1})
        fs.full = fs.frozen = False
        with pytest.raises(IntegrityError, match="half-way"):
            journal.append({"n": 2})
    with Journal(path) as journal:
        assert [r["n"] for r in journal.records] == [0]


class Recorder(RealFileSystem):
    def __init__(self):
        self.calls = []

    def write(self, file, data):
        self.calls.append("write")
        super().write(file, data)

    def sync(self, file):
        self.calls.append("sync")
        super().sync(file)

    def sync_dir(self, path):
        self.calls.append(f"sync_dir {path.name}")
        super().sync_dir(path)


def test_every_append_is_synced_and_creation_syncs_the_folder(tmp_path):
    fs = Recorder()
    with Journal(tmp_path / "new" / "journal.jsonl", fs=fs) as journal:
        assert fs.calls == [f"sync_dir {tmp_path.name}", "sync", "sync_dir new"]
        fs.calls.clear()
        journal.append({})
        journal.append({})
        assert fs.calls == ["write", "sync"] * 2
        fs.calls.clear()
        journal.extend({"n": n} for n in range(1000))
        journal.extend(())
        assert fs.calls == ["write", "sync"], "a thousand cost no more than one"


def test_many_records_at_once_are_those_of_one_after_the_other(tmp_path):
    one_by_one = written(tmp_path / "a.jsonl")
    with Journal(tmp_path / "b.jsonl") as journal:
        journal.append(RECORDS[0])
        journal.extend(RECORDS[1:])
        assert [r["seq"] for r in journal.records] == list(range(len(RECORDS)))
    data = (tmp_path / "b.jsonl").read_bytes()
    assert data == one_by_one
    # A crash may keep any beginning of them: whole records in order, and a torn one.
    for size in range(len(data)):
        found = fold(data[:size], tmp_path / "b.jsonl").records
        assert [r["unit"] for r in found] == list(range(len(found)))


def test_many_records_that_find_no_room_leave_the_journal_as_it_was(tmp_path):
    path, fs = tmp_path / "journal.jsonl", FullDisk()
    with Journal(path, fs=fs) as journal:
        journal.append({"n": 0})
        before = path.read_bytes()
        fs.full = True
        with pytest.raises(OSError, match="No space"):
            journal.extend([{"n": 1}, {"n": 2}])
        assert path.read_bytes() == before
        assert len(journal.records) == 1


def test_sigkill_loses_no_acknowledged_record(tmp_path):
    path = tmp_path / "journal.jsonl"
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from paceline.durable.journal import Journal
        with Journal(Path(sys.argv[1])) as journal:
            while True:
                journal.append({"text": "x" * (len(journal.records) * 37 % 500)})
                print(len(journal.records), flush=True)
        """
    )
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    acknowledged = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in (first + process.stdout.read()).splitlines()]
        process.wait()
        process.stdout.close()
        assert said[0] > acknowledged, "a restart went on behind the records of the last run"
        acknowledged = said[-1]
        assert len(fold(path.read_bytes(), path).records) >= acknowledged


def test_a_journal_hands_its_records_on_and_keeps_none(tmp_path):
    path = tmp_path / "journal.jsonl"
    places = {}

    def note(record, offset):
        places[record["seq"]] = offset

    with Journal(path, on_record=note) as journal:
        journal.extend(RECORDS[:2])
        journal.append(RECORDS[2])
        assert journal.records == ()
        written = dict(places)
    path.write_bytes(path.read_bytes() + b"0123")
    places.clear()
    with Journal(path, on_record=note) as journal:
        assert places == written
        journal.append(RECORDS[3])
        assert journal.records == ()
    with path.open("rb") as file:
        found = [record_at(file, places[seq]) for seq in (3, 0, 2)]
        assert found == [{"v": 1, "seq": seq, **RECORDS[seq]} for seq in (3, 0, 2)]
        assert record_at(file, places[2] + 1) is None
