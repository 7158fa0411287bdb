"""What `status` says of an extraction beyond its counts."""

import msgspec
import pytest

from paceline.cli.extraction_lines import extraction_lines
from paceline.status_parts import Extraction, extraction_part

EVENT = {
    "kind": "progress",
    "units": 10,
    "units_done": 4,
    "workers": [
        {
            "number": 0,
            "state": "capturing",
            "pid": 7,
            "device": "cuda:0",
            "unit": "u5",
            "since": 90,
        },
        {"number": 1, "state": "loading", "since": 95.0},
    ],
    "waiting": {"kind": "space", "reason": "/dev/shm is 91 % full", "since": 40.0},
    "stuck": [
        {"worker": 1, "call": "fsync", "path": "mnt/x", "since": 5.0, "process_state": "D"},
        {"worker": None, "call": "append", "path": "mnt/j", "since": 95.0},
    ],
    "staging_bytes": 3_000_000,
    "staging_limit": 4_000_000,
    "backlog_units": 2,
    "stall_seconds": {"budget": 62.0, "space": 0.2},
    "free_bytes": 9_400_000_000_000,
}


def lines(event, *, is_running=True):
    found = extraction_part(event, is_running=is_running)
    assert found is not None
    return list(extraction_lines(found, 100.0))


def test_workers_waits_and_calls_that_hang_are_named():
    text = "\n".join(lines(EVENT))
    assert "worker 0 on cuda:0 capturing u5 for 10s" in text
    assert "worker 1 loading for 5.0s" in text
    assert "worker 1: fsync mnt/x has not returned for 1m35s (process state D)" in text
    assert "the extraction itself: append mnt/j has not returned for 5.0s" in text
    assert "waits for 1m00s: /dev/shm is 91 % full" in text
    assert "2 shards on the way to the store, 3.00 MB of 4.00 MB in staging" in text
    assert "waited in all 1m02s for budget" in text
    assert "space" not in text.rpartition("waited in all")[2]
    assert "9.40 TB free" in text


def test_of_many_workers_the_states_are_counted():
    many = [{"number": n, "state": "capturing" if n % 3 else "loading"} for n in range(12)]
    assert lines({"workers": many}) == ["extract: 12 workers: 8 capturing, 4 loading"]


def test_of_one_that_has_ended_nothing_is_said_to_go_on():
    text = "\n".join(lines(EVENT, is_running=False))
    assert "capturing" not in text
    assert "has not returned" not in text
    assert "waits for" not in text
    assert "9.40 TB free" in text


def test_an_event_without_all_that_says_nothing():
    assert lines({"kind": "progress", "units": 3}) == []


@pytest.mark.parametrize("value", [{"workers": 3}, {"stuck": "x"}, {"staging_bytes": "many"}])
def test_an_event_of_another_form_is_passed_over(value):
    assert extraction_part(EVENT | value, is_running=True) is None


def test_what_is_not_known_is_not_an_error():
    assert extraction_part(EVENT | {"new_key": 1}, is_running=True) is not None
    assert msgspec.json.decode(msgspec.json.encode(Extraction()), type=Extraction) == Extraction()
