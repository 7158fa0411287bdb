"""The end of an event file: bounded, and readable whatever was cut off or damaged."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.watch.events import Counts, EventWriter
from paceline.watch.tail import counts_of, last_events


def line(number: int, *, filler: int = 0) -> bytes:
    event = {"v": 2, "t": 1.5, "pid": 7, "kind": "step", "step": number, "filler": "x" * filler}
    return json.dumps(event).encode() + b"\n"


def steps(path: Path, **how: int) -> list[int]:
    return [event["step"] for event in last_events(path, **how)]


@settings(max_examples=80, deadline=None)
@given(
    fillers=st.lists(st.integers(0, 90), max_size=12),
    block=st.integers(1, 300),
    data=st.data(),
)
def test_cut_anywhere_the_whole_lines_are_read_newest_first(tmp_path_factory, fillers, block, data):
    path = tmp_path_factory.mktemp("cut") / "train.jsonl"
    content = b"".join(line(n, filler=size) for n, size in enumerate(fillers))
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    # A line that lacks nothing but its end is whole.
    whole = sum((content[:cut] + b"\n").count(line(n, filler=f)) for n, f in enumerate(fillers))
    assert steps(path, block=block) == list(range(whole))[::-1]


@settings(max_examples=150, deadline=None)
@given(junk=st.lists(st.binary(max_size=40), max_size=8), block=st.integers(1, 64))
def test_no_bytes_at_all_are_an_error(tmp_path_factory, junk, block):
    path = tmp_path_factory.mktemp("junk") / "train.jsonl"
    path.write_bytes(line(1) + b"\n".join(junk) + b"\n" + line(2))
    found = steps(path, block=block)
    assert (found[0], found[-1]) == (2, 1)


@pytest.mark.parametrize(
    "odd",
    [
        b'{"v":2,"t":1e999,"pid":7,"kind":"step"}',
        b'{"v":2,"t":1e300,"pid":7,"kind":"step"}',
        b'{"v":2,"t":-1,"pid":7,"kind":"step"}',
        b'{"v":2,"t":true,"pid":7,"kind":"step"}',
        b'{"v":2,"t":1,"pid":"7","kind":"step"}',
        b'{"v":2,"t":1,"pid":7,"kind":null}',
        b"[1, 2]",
        b"[" * 100_000,
        b"\0" * 5000,
    ],
)
def test_what_is_no_event_is_passed_over(tmp_path, odd):
    path = tmp_path / "train.jsonl"
    path.write_bytes(line(1) + odd + b"\n" + line(2))
    assert steps(path) == [2, 1]


def test_only_the_end_of_a_huge_file_is_read(tmp_path):
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        file.write(line(1))
        file.truncate(8 << 30)
        file.seek(0, 2)
        file.write(b"\n" + line(2))
    assert steps(path) == [2]


def test_counts_are_read_as_they_were_written_or_not_at_all(tmp_path):
    counts = Counts(unit="samples", total=9, done=4, redone={"empty": 1}, tokens=3, rate=1.5)
    with EventWriter(tmp_path, "train") as events:
        events.emit("progress", counts, total_of_another="x")
    (event,) = last_events(tmp_path / "train.jsonl")
    assert counts_of(event) == counts
    assert counts_of(event | {"v": 3}) is None
    assert counts_of(event | {"done": "4"}) is None
    assert counts_of({"v": 2, "kind": "redo"}) is None
