"""Writing events never stops the work, and swallows no event that can be written."""

import json
import math
from pathlib import Path

import pytest

from paceline.durable.errors import DataError, Interrupted, WorkerFailed
from paceline.flow.signals import Terminated
from paceline.watch.events import Counts, EventWriter, by_reason


def written(folder: Path, role: str = "train") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{role}.jsonl").read_bytes().splitlines()]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "events"


def test_counts_and_own_fields_stand_in_one_line(folder):
    with EventWriter(folder, "train") as events:
        counts = Counts(unit="samples", total=9, done=4, quarantined={"skipped_step": 2})
        events.emit("step", counts, step=3, loss=math.nan, done=-1)
    (event,) = written(folder)
    assert (event["v"], event["role"], event["kind"]) == (2, "train", "step")
    assert event["quarantined"] == {"skipped_step": 2}
    assert (event["done"], event["total"], event["step"], event["loss"]) == (4, 9, 3, None)
    assert event["elapsed"] >= 0
    assert event["host"]


def test_without_an_event_there_is_no_file_and_without_a_run_no_folder(tmp_path):
    with EventWriter(tmp_path / "run" / "events", "train"):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError), EventWriter(tmp_path / "run" / "events", "train"):
        raise DataError("refused")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "kind", "refused", "text"),
    [
        (DataError("rows.jsonl: gone."), "failed", True, "rows.jsonl: gone."),
        (WorkerFailed("item 3 failed"), "failed", False, "item 3 failed"),
        (ZeroDivisionError("by zero"), "failed", False, "ZeroDivisionError: by zero"),
        (Interrupted("SIGTERM: stopped."), "interrupted", None, "SIGTERM: stopped."),
        (KeyboardInterrupt(), "interrupted", None, "stopped at once, by Ctrl-C"),
        (Terminated("SIGTERM"), "interrupted", None, "stopped at once, by SIGTERM"),
        (OSError("caf\udce9"), "failed", False, "OSError: caf\\udce9"),
    ],
)
def test_the_exception_that_ends_a_stage_is_told_with_the_last_counts(
    folder, error, kind, refused, text
):
    error.add_note("while item 7")
    events = EventWriter(folder, "train")
    events.emit("start", Counts(unit="samples", done=5))
    with pytest.raises(type(error)), events:
        raise error
    last = written(folder)[-1]
    assert (last["kind"], last.get("refused"), last["done"]) == (kind, refused, 5)
    assert last["error"] == f"{text}\nwhile item 7"


def test_a_line_that_a_dead_process_cut_off_swallows_no_event(folder):
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(b'{"v":2,"kind":"st')
    with EventWriter(folder, "train") as events:
        events.emit("start")
    torn, start = (folder / "train.jsonl").read_bytes().splitlines()
    assert torn == b'{"v":2,"kind":"st'
    assert json.loads(start)["kind"] == "start"


def test_a_full_disk_stops_nothing_and_events_go_on_when_there_is_room(folder):
    folder.mkdir()
    path = folder / "train.jsonl"
    path.symlink_to("/dev/full")
    with EventWriter(folder, "train") as events:
        events.emit("start")
        path.unlink()
        events.emit("progress")
    assert [event["kind"] for event in written(folder)] == ["progress"]


def test_what_cannot_be_written_as_json_is_left_out(folder):
    with EventWriter(folder, "train") as events:
        events.emit("progress", odd=object())
        events.emit("progress", odd="\udce9")
        events.emit("progress", odd=2**70)
        events.emit("finished")
    assert written(folder)[-1]["kind"] == "finished"


def test_no_folder_for_events_stops_nothing(tmp_path):
    (tmp_path / "events").write_text("a file")
    with EventWriter(tmp_path / "events", "train") as events:
        events.emit("start")


def test_reasons_are_counted_by_kind():
    reasons = ["torn or damaged (3 of 9 bytes)", "torn or damaged (1 bytes)", "empty", "gone."]
    assert by_reason(reasons) == {"torn or damaged": 2, "empty": 1, "gone": 1}
