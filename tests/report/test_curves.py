"""Curves from event files, resumed and long ones too."""

import json
import math
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.events import read_events
from paceline.report.thin import POINTS, smooth, thin

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def write(folder: Path, *events: dict, name: str = "train") -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps({"v": 2, "t": 0.0, "pid": 1, **e}) + "\n" for e in events)


def step(number: int, loss: float | None, kind: str = "step") -> dict:
    return {"kind": kind, "step": number, "loss": loss, "learning_rate": 0.1, "gradient_norm": 1}


def evaluation(number: int, tau: float) -> dict:
    return {"kind": "evaluation", "step": number, "simulated_tau": {"chain": tau}}


def test_a_resumed_run_keeps_what_its_weights_come_from(tmp_path):
    write(tmp_path, {"kind": "start"}, evaluation(0, 1.0))
    write(tmp_path, *(step(n, 10.0 + n) for n in range(1, 7)), evaluation(4, 1.4))
    write(tmp_path, step(7, None, "skipped_step"), evaluation(7, 1.7))
    write(tmp_path, {"kind": "start"}, step(5, 5.0), step(6, 6.0), evaluation(6, 1.6))
    training = read_events(tmp_path, ("train",)).training
    assert [*training.steps] == [1, 2, 3, 4, 5, 6]
    assert [*training.loss] == [11.0, 12.0, 13.0, 14.0, 5.0, 6.0]
    assert training.evaluations == {0: {"chain": 1.0}, 4: {"chain": 1.4}, 6: {"chain": 1.6}}
    assert training.skipped == []


def test_a_skipped_step_is_a_gap_and_is_listed(tmp_path):
    write(tmp_path, step(1, 3.0), step(2, None, "skipped_step"), step(3, 2.0))
    training = read_events(tmp_path, ("train",)).training
    assert math.isnan(training.loss[1])
    assert training.skipped == [2]


def test_time_between_two_starts_is_no_work(tmp_path):
    write(tmp_path, {"kind": "start", "t": 100.0}, {"kind": "progress", "t": 130.0}, name="score")
    write(tmp_path, {"kind": "start", "t": 900.0, "pid": 2}, name="score")
    write(tmp_path, {"kind": "failed", "t": 950.5, "pid": 2, "error": "no room"}, name="score")
    time = read_events(tmp_path, ("train", "score")).times["score"]
    assert (time.started, time.ended, time.seconds) == (100.0, 950.5, 80.5)


def test_a_torn_end_is_waited_for_and_a_bad_line_is_counted(tmp_path):
    write(tmp_path, step(1, 3.0))
    with (tmp_path / "train.jsonl").open("ab") as file:
        file.write(b'{"t": 1}\n[]\n{"kind":"step","t":1,"step":"x"}\n{"kind":"step","t":')
    events = read_events(tmp_path, ("train",))
    assert [*events.training.steps] == [1]
    assert events.unreadable == {"train.jsonl": 3}


def test_a_long_file_is_streamed(tmp_path):
    padding = {"sample_ids": ["x" * 2000]}
    write(tmp_path, *(step(n, 1.0 / n) | padding for n in range(1, 5001)))
    assert (tmp_path / "train.jsonl").stat().st_size > 10_000_000
    tracemalloc.start()
    training = read_events(tmp_path, ("train",)).training
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(training.steps) == 5000
    assert peak < 1_000_000


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(4, 60))
def test_thin_keeps_ends_and_extremes_within_the_limit(values, limit):
    kept = thin(values, limit)
    assert kept == sorted({*kept})
    assert len(kept) <= max(limit, 4)
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        shown = [values[i] for i in kept if math.isfinite(values[i])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_million_points_show_their_one_spike():
    values = [1.0] * 1_000_000
    values[654_321] = 9.0
    kept = thin(values)
    assert len(kept) <= POINTS
    assert 654_321 in kept


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.integers(1, 20))
def test_smooth_is_the_mean_of_what_is_finite_around(values, window):
    for index, mean in enumerate(smooth(values, window, range(len(values)))):
        around = values[max(0, index - window // 2) : index + window // 2 + 1]
        finite = [v for v in around if math.isfinite(v)]
        if finite:
            scale = sum(abs(v) for v in values if math.isfinite(v)) or 1.0
            assert mean == pytest.approx(sum(finite) / len(finite), abs=1e-9 * scale)
        else:
            assert math.isnan(mean)
