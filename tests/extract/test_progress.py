"""What the progress of an extraction counts, and how much time it says is left."""

import re
import time

import numpy as np
import pytest

from paceline.durable.depot import DepotMeters
from paceline.durable.errors import Interrupted
from paceline.durable.stalls import Wait
from paceline.extract.job import UnitTimes
from paceline.extract.progress import Progress
from paceline.features.plan import Unit
from paceline.flow.units import Snapshot, WorkerView
from paceline.watch.events import EventWriter

UNITS = [
    Unit(index, 2 * index, 2 * index + 2, ((2 * index, 2 * index + 1),)) for index in range(20)
]
TIMES = UnitTimes(samples=2, timed_tokens=200, seconds=1.0, warmed=0, warm_up_seconds=0.0, copies=1)


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


def test_the_plain_line_has_the_rate_of_the_workers_and_not_that_of_their_loading(progress, caplog):
    caplog.set_level("INFO")
    progress._terminal._last_line -= 60.0
    began, done = progress._terminal._start
    progress._terminal._start = (began - 60.0, done)
    progress.add(2, TIMES)
    assert caplog.messages == [
        "extract: 600 of 4,000 tokens (15 %), 400 tokens/s, 00:08 left",
    ]


def test_before_anything_was_timed_no_rate_is_made_up(progress, caplog):
    caplog.set_level("INFO")
    progress._terminal._last_line -= 60.0
    progress.add(2, None)
    assert caplog.messages == ["extract: 600 of 4,000 tokens (15 %)"]


def test_what_ends_early_says_how_it_stands(progress, caplog):
    """The last line of a night that was stopped: what is done, how fast, what is left."""
    caplog.set_level("INFO")

    def stopped() -> None:
        with progress.shown():
            progress.add(2, TIMES)
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        stopped()
    assert re.fullmatch(
        r"extract: skipped 4 verified, 2 new, 0 errors, 4\.00 samples/s, 400 tokens/s, "
        r"00:08 left, [\d.]+ .B free",
        caplog.messages[-1],
    )


def test_what_is_made_again_after_a_death_stands_beside_what_proved_nothing(tmp_path):
    with EventWriter(tmp_path, "extract") as events:
        progress = Progress(
            events,
            UNITS,
            np.full(40, 100, dtype=np.int32),
            skipped=set(),
            redone={"torn or damaged": 1},
            workers=2,
            place=tmp_path,
        )
    assert progress.line().startswith("skipped 0 verified, 0 new, 0 errors, 1 shard redone")
    progress.tick(Snapshot((), meters({}), redone=2))
    counts = progress.counts()
    assert counts.redone == {"torn or damaged": 1, "after a death or failure": 2}
    assert (counts.unit, counts.redone_unit) == ("samples", "shards")
    assert progress.line().startswith("skipped 0 verified, 0 new, 0 errors, 3 shards redone")


def test_workers_that_gave_up_bring_nothing_to_the_rate(progress):
    """Two were to run; of four that were seen, two have a process."""

    def views(*pids):
        return tuple(
            WorkerView(number, pid, None, "capturing" if pid else "gave up", None, 0.0)
            for number, pid in enumerate(pids)
        )

    progress.add(2, TIMES)
    assert (progress.tokens_per_s, progress.samples_per_s) == (400.0, 4.0)
    progress.tick(Snapshot(views(11, 12, 13, 14), meters({})))
    assert (progress.tokens_per_s, progress.samples_per_s) == (800.0, 8.0)
    progress.tick(Snapshot(views(11, None, None, 14), meters({})))
    assert progress.counts().rate == 400.0
    assert progress.counts().eta == 17 * 200 / 400
    progress.tick(Snapshot(views(None, None, None, 14), meters({})))
    assert progress.counts().rate == 200.0
    progress.tick(Snapshot((), meters({})))
    assert progress.counts().rate == 200.0, "at the end there are none, and it was so"
