"""What the progress of an extraction counts, and how much time it says is left."""

import time

import numpy as np
import pytest

from paceline.durable.depot import DepotMeters
from paceline.durable.stalls import Wait
from paceline.extract.job import UnitTimes
from paceline.extract.progress import Progress
from paceline.features.plan import Unit
from paceline.flow.units import Snapshot
from paceline.watch.events import EventWriter

UNITS = [
    Unit(index, 2 * index, 2 * index + 2, ((2 * index, 2 * index + 1),)) for index in range(20)
]
TIMES = UnitTimes(timed_tokens=200, seconds=1.0, warmed=0, warm_up_seconds=0.0, copies=1)


@pytest.fixture
def progress(tmp_path):
    with EventWriter(tmp_path, "extract") as events:
        yield Progress(
            events,
            UNITS,
            np.full(40, 100, dtype=np.int32),
            skipped={0, 1},
            redone={},
            workers=2,
            place=tmp_path,
        )


def meters(stalls: dict[str, float], waiting: Wait | None = None) -> DepotMeters:
    return DepotMeters(0, 0, 0, 0, 0, 0, 0.0, stalls, waiting, 0, None)


def test_without_stalls_the_time_left_is_that_of_the_workers(progress):
    assert progress.counts().eta is None
    progress.add(2, TIMES)
    progress.tick(Snapshot((), meters({"budget": 0.001})))
    assert progress.counts().rate == 400.0
    assert progress.counts().eta == 17 * 200 / 400


def test_what_staging_holds_up_is_not_promised_at_the_rate_of_the_workers(progress):
    progress._began = time.monotonic() - 100.0
    progress.add(2, TIMES)
    progress.tick(Snapshot((), meters({"budget": 90.0})))
    assert progress.counts().rate == 400.0, "what they can do"
    assert progress.counts().eta == pytest.approx(17 * 100, rel=0.01), "2 tokens/s are stored"


def test_what_an_earlier_start_had_made_is_no_measure_of_the_rate(progress):
    progress.add(2, None)
    assert progress.counts().rate is None
    assert progress.counts().eta is None
    assert progress.counts().done == 6


def test_units_set_aside_are_dealt_with_and_no_time_is_left_for_them(progress):
    for index in range(2, 10):
        progress.add(index, TIMES)
    for index in range(10, 20):
        progress.set_aside(index, "made no shard")
    counts = progress.counts()
    assert (counts.done, counts.total, counts.skipped) == (40, 40, 4)
    assert counts.failed == sum(counts.quarantined.values()) == 20
    assert counts.tokens == counts.tokens_total
    assert counts.eta == 0.0
    assert progress.line().startswith("skipped 4 verified, 16 new, 20 errors")


def test_a_row_of_failures_is_not_the_units_fault(progress):
    for index in range(2, 13):
        progress.set_aside(index, "made no shard")
    assert not progress.is_hopeless
    progress.add(13, TIMES)
    progress.set_aside(14, "made no shard")
    assert not progress.is_hopeless
    for _ in range(11):
        progress.set_aside(15, "made no shard")
    assert progress.is_hopeless


def test_what_hangs_stands_beside_the_progress_for_as_long_as_it_does(progress):
    fields = {"worker": 0, "call": "sync", "path": "/data/unit", "seconds": 65.0}
    progress.tick(Snapshot((), meters({}, Wait("no room", "space", time.time()))))
    progress.hangs(fields)
    assert progress._note() == "worker 0: sync /data/unit has not returned for 01:05"
    progress.returned(fields)
    assert progress._note() == "waiting: no room"
