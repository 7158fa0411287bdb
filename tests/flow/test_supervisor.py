"""The supervisor over real processes that die, hang and lie in every way."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import flow_unit_workers as units
from flow_unit_workers import MemoryDepot, Plan
from paceline.durable.budget import Budget
from paceline.durable.code import source_hash
from paceline.durable.depot import Depot, Failed, Verified
from paceline.durable.errors import (
    IntegrityError,
    Interrupted,
    StorageRefused,
    StoreFailed,
    TargetError,
    UserError,
    WorkerFailed,
)
from paceline.durable.fs import REAL_FS
from paceline.durable.iowatch import IoWatch, Ongoing, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.local_depot import LocalDepot
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import Staging
from paceline.durable.stalls import Wait
from paceline.durable.store import LocalStore, Stat
from paceline.durable.uploader import Uploader
from paceline.flow import supervisor
from paceline.flow.stuck import StuckCalls
from paceline.flow.supervisor import supervise
from paceline.flow.units import Made, Outcome, Policy, Snapshot, Task
from paceline.flow.waker import Waker

QUICK = Policy(workers=2, backoff=0.01, stuck_after=20.0)


@dataclass
class Run:
    """One call of `supervise`, and everything that it told."""

    folder: Path
    plan: Plan
    depot: MemoryDepot
    count: int = 6
    made: dict[str, Made | None] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ticks: list[Snapshot] = field(default_factory=list)
    at_verified: Callable[[Task], None] = lambda _: None
    at_event: Callable[[str, dict[str, Any]], None] = lambda _kind, _fields: None
    at_tick: Callable[[Snapshot], None] = lambda _: None

    def go(self, policy: Policy = QUICK, **more: Any) -> Outcome:
        def on_verified(task: Task, made: Made | None, stat: Stat) -> None:
            self.made[task.key] = made
            self.times[task.key] += 1
            assert made is None or made.stat == stat
            self.at_verified(task)

        def on_event(kind: str, fields: dict[str, Any]) -> None:
            self.events.append((kind, fields))
            self.at_event(kind, fields)

        def on_tick(snapshot: Snapshot) -> None:
            self.ticks.append(snapshot)
            self.at_tick(snapshot)

        try:
            return supervise(
                units.unit_worker,
                self.plan,
                units.tasks(self.count),
                self.depot,
                policy=policy,
                on_verified=on_verified,
                on_event=on_event,
                on_tick=on_tick,
                **more,
            )
        finally:
            assert not workers_of(psutil.Process())

    def told(self, kind: str, what: str | None = None) -> list[dict[str, Any]]:
        return [f for k, f in self.events if k == kind and what in (None, f.get("what"))]

    def handed(self, index: int) -> list[int]:
        """Numbers of the workers that got a unit, in order."""
        path = self.folder / f"handed-{index}"
        return [int(line.split()[0]) for line in path.read_text().splitlines()]

    def assert_verified_once(self, *missing: str) -> None:
        keys = {task.key for task in units.tasks(self.count)} - set(missing)
        assert self.times == dict.fromkeys(keys, 1)
        assert self.depot.verified == self.times
        for task in units.tasks(self.count):
            if task.key in keys:
                assert (self.depot.folder / task.key).read_bytes() == units.content(task)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    def make(count: int = 6, limit: int = 10**9, **plan: Any) -> Run:
        depot = MemoryDepot(tmp_path / "store", limit)
        return Run(tmp_path, Plan(tmp_path, **plan), depot, count)

    return make


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            if "paceline-worker" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_unit_once_by_several_processes_and_the_infos_come_along(run):
    it = run(count=12, seconds=0.05)
    outcome = it.go()
    assert outcome == Outcome(verified=12)
    it.assert_verified_once()
    pids = {made.info["pid"] for made in it.made.values()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert [f["what"] for f in it.told("worker")] == ["started", "started"]
    states = {w.state for s in it.ticks for w in s.workers}
    assert {"starting", "warming", "capturing", "draining"} <= states
    working = [w for s in it.ticks for w in s.workers if w.unit]
    assert {w.pid for w in working} == pids
    assert all(abs(w.since - time.time()) < 60 for w in working)


def test_nothing_to_do_starts_nothing(run):
    it = run(count=0)
    assert it.go() == Outcome(verified=0)
    assert it.events == []


def test_no_more_processes_than_units(run):
    it = run(count=1)
    it.go(Policy(workers=4))
    assert len(it.told("worker")) == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segv", "was killed by SIGSEGV"),
        ("exit", "ended with exit code 3"),
        ("sys.exit", "ended with exit code 4"),
        ("raise", "the work failed: ValueError: unit-2 is bad"),
        ("unpicklable", "the work failed"),
    ],
)
def test_a_death_costs_one_unit_which_another_worker_makes(run, how, words):
    it = run(how={2: how}, seconds=0.02)
    assert it.go() == Outcome(verified=6, redone=1, deaths=1)
    it.assert_verified_once()
    (died,) = it.told("worker", "died")
    assert words in died["how"]
    (failed,) = it.told("failed_unit")
    assert failed["key"] == "unit-002"
    assert (failed["worker"], failed["times"]) == (died["number"], 1)
    assert words in failed["reason"]
    assert it.depot.abandoned == ["unit-002"]
    assert sum(len(it.handed(i)) for i in range(6)) == 7


def test_the_unit_goes_to_another_worker_even_where_its_own_is_back_first(run):
    it = run(count=3, how={0: "kill"}, seconds=0.6)
    it.go()
    first, second = it.handed(0)
    assert first != second
    it.assert_verified_once()


def test_a_single_worker_gets_its_unit_back_first(run):
    it = run(count=4, how={1: "kill"})
    assert it.go(Policy(workers=1, backoff=0.01)).redone == 1
    marks = sorted(it.folder.glob("handed-*"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in marks] == [f"handed-{i}" for i in range(4)]
    assert it.handed(1) == [0, 0]
    (again,) = it.told("worker", "restarted")
    assert "SIGKILL" in again["how"]


@pytest.mark.parametrize("how", ["kill", "raise", "own"])
def test_a_poison_unit_is_quarantined_by_name_and_the_rest_goes_on(run, how):
    it = run(how={1: how}, times=99)
    outcome = it.go()
    deaths = 0 if how == "own" else 2
    assert (outcome.verified, outcome.deaths, outcome.redone) == (5, deaths, 1)
    assert list(outcome.quarantined) == ["unit-001"]
    it.assert_verified_once("unit-001")
    assert [f["times"] for f in it.told("failed_unit")] == [1, 2]
    (told,) = it.told("quarantined")
    assert told["reason"] == outcome.quarantined["unit-001"]
    expected = {"kill": "SIGKILL", "raise": "is bad", "own": "TargetError: unit-1: not finite"}
    assert expected[how] in told["reason"]
    assert len(it.handed(1)) == 2
    assert "unit-001" not in it.depot.held


def test_a_death_in_the_setup_is_no_units_fault(run):
    it = run(setup={0: "kill", 1: "raise"})
    assert it.go() == Outcome(verified=6, deaths=2)
    assert it.told("failed_unit") == []
    assert "the setup failed: ValueError" in str(it.told("worker", "died"))


def test_a_worker_that_hangs_in_its_setup_holds_up_nobody(run):
    it = run(setup={0: "hang"}, times=99)
    started = time.monotonic()
    assert it.go() == Outcome(verified=6)
    assert time.monotonic() - started < 10
    assert it.told("worker", "died") == []


def test_a_worker_whose_restarts_are_spent_gives_up_and_the_others_go_on(run):
    it = run(setup={0: "exit"}, times=99)
    it.depot.wait = Wait("until then", "space", time.time())

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if fields.get("what") == "gave_up":
            it.depot.wait = None

    it.at_event = at_event
    outcome = it.go(Policy(workers=2, backoff=0.01, restarts=2))
    assert (outcome.verified, outcome.deaths) == (6, 3)
    (gave_up,) = it.told("worker", "gave_up")
    assert gave_up["number"] == 0
    assert len(it.told("worker", "restarted")) == 2
    assert {w.state for s in it.ticks for w in s.workers if w.number == 0} >= {"gave up"}


def test_when_all_have_given_up_the_error_names_each_last_cause(run):
    it = run(setup={0: "exit", 1: "raise"}, times=99)
    with pytest.raises(WorkerFailed) as caught:
        it.go(Policy(workers=2, backoff=0.01, restarts=1))
    text = str(caught.value)
    assert "6 of 6 units are left" in text
    assert "worker 0: ended with exit code 3" in text
    assert "worker 1: the setup failed: ValueError: setup-1 is bad" in text
    assert it.depot.calls["admit"] == 0


def test_pauses_between_restarts_grow(run):
    starts: list[float] = []
    it = run(count=1, setup={0: "exit"}, times=99)
    it.at_event = lambda kind, fields: (
        starts.append(time.monotonic())
        if kind == "worker" and (fields["what"] in ("died", "restarted"))
        else None
    )
    with pytest.raises(WorkerFailed):
        it.go(Policy(workers=1, backoff=0.05, restarts=3))
    died, back = starts[0::2], starts[1::2]
    pauses = [b - d for d, b in zip(died, back, strict=False)]
    assert len(pauses) == 3
    for pause, least in zip(pauses, (0.05, 0.1, 0.2), strict=True):
        assert least <= pause < least + 0.3


@pytest.mark.parametrize("isolate", [True, False])
def test_an_error_of_the_users_in_a_setup_ends_it_before_anything_is_made(run, isolate):
    it = run(setup={0: "own", 1: "own"}, times=99)
    with pytest.raises(TargetError, match=r"setup-\d: not finite") as caught:
        it.go(Policy(workers=2, backoff=60.0, isolate=isolate))
    assert "while setting up" in caught.value.__notes__[0]
    assert it.told("worker", "restarted") == []


@pytest.mark.parametrize("fault", ["setup", "code"])
def test_a_late_error_of_the_users_leaves_units_in_work_to_be_finished(run, monkeypatch, fault):
    """Unit 0 kills its worker; started again, that one refuses, while the other is at work."""
    it = run(count=9, how={0: "exit"}, setup={0: "later", 1: "later"}, times=1, seconds=1.5)
    it.at_event = lambda kind, fields: None
    error, match = TargetError, r"setup-\d: not finite"
    if fault == "code":
        error, match = UserError, r"workers of different code in one run: worker \d "
        it.plan.setup.clear()
        original = supervisor.Worker.start

        def start(worker):
            # As if the files had been changed since: the process says another hash.
            if worker.starts:
                monkeypatch.setattr("paceline.flow.crew.work", units.work_with_other_code)
            return original(worker)

        monkeypatch.setattr(supervisor.Worker, "start", start)
    policy = Policy(workers=2, backoff=0.01, code=source_hash())
    with pytest.raises(error, match=match):
        it.go(policy)
    begun = {n for n in range(9) if (it.folder / f"handed-{n}").exists()}
    assert len(begun) >= 2, "the other one was at work"
    if len(it.handed(0)) == 1:
        begun -= {0}  # its worker died over it, and nobody had it since
    assert set(it.made) == {f"unit-{n:03d}" for n in begun}
    assert it.depot.verified == it.times
    assert not (it.folder / "handed-8").exists(), "no more are begun"
    assert len(it.told("worker", "restarted")) == 1


def test_workers_of_other_code_are_refused_before_their_setup(run):
    it = run()
    with pytest.raises(UserError, match="workers of different code in one run"):
        it.go(Policy(workers=2, code="0123456789abcdef"))
    assert list(it.folder.glob("pid-*")) == []
    it = run()
    assert it.go(Policy(workers=2, code=source_hash())).verified == 6


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(("how", "number"), [("full", 28), ("refused", 122)])
def test_no_room_is_no_fault_of_the_unit_or_the_worker(run, how, number, isolate):
    it = run(how={2: how}, times=3)
    outcome = it.go(Policy(workers=1, backoff=0.01, isolate=isolate))
    assert outcome == Outcome(verified=6)
    it.assert_verified_once()
    assert [(key, error.errno) for key, error in it.depot.refusals] == [("unit-002", number)] * 3
    if how == "full":
        assert it.depot.refusals[0][1].filename == "/staging/unit"
    assert it.told("failed_unit") == []
    assert it.told("worker", "died") == []
    marks = sorted(it.folder.glob("handed-*"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in marks] == [f"handed-{i}" for i in range(6)]


@pytest.mark.parametrize("isolate", [True, False])
def test_without_room_nothing_is_handed_out_and_it_is_said_once(run, isolate):
    it = run(count=5, limit=250)
    it.depot.hold_back = True

    def at_tick(snapshot: Snapshot) -> None:
        assert sum(it.depot.held.values()) <= 250
        if any(w.state == "waiting for upload" for w in snapshot.workers):
            # After a good many turns of the loop, so that a repeated report would show.
            threading.Timer(0.5, setattr, (it.depot, "hold_back", False)).start()

    it.at_tick = at_tick
    assert it.go(Policy(workers=3, backoff=0.01, isolate=isolate)).verified == 5
    kinds = [kind for kind, _ in it.events if kind in ("waiting", "going_on")]
    assert kinds[:2] == ["waiting", "going_on"]
    assert kinds == ["waiting", "going_on"] * (len(kinds) // 2)
    assert it.told("waiting")[0] == {"kind": "budget", "reason": "staging is full"}
    assert it.depot.calls["admit"] > 7
    it.assert_verified_once()


def test_another_reason_to_wait_is_told_as_well(run):
    it = run(count=2)
    it.depot.wait = Wait("disk full", "space", time.time())

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "waiting":
            waits = {"space": Wait("journal", "journal", time.time()), "journal": None}
            it.depot.wait = waits[fields["kind"]]

    it.at_event = at_event
    it.go()
    assert [f["kind"] for f in it.told("waiting")] == ["space", "journal"]
    assert len(it.told("going_on")) == 1


@pytest.mark.parametrize("isolate", [True, False])
def test_a_depot_that_is_overdue_ends_the_work_after_what_is_in_it(run, isolate):
    it = run(count=50, seconds=0.1)

    def at_verified(task: Task) -> None:
        it.depot.gives_up = "the store has not answered for 1 hour"

    it.at_verified = at_verified
    with pytest.raises(StorageRefused, match="has not answered for 1 hour"):
        it.go(Policy(workers=2, isolate=isolate))
    begun = len(list(it.folder.glob("handed-*")))
    assert begun <= 4
    # What was in work is written and given to the depot.
    whole = [path for path in it.depot.folder.iterdir() if ".partial" not in path.name]
    assert len(whole) == begun


def test_a_unit_that_the_depot_can_never_take_is_the_users_to_know(run):
    it = run(limit=50)
    with pytest.raises(UserError, match="100 bytes are more than 50"):
        it.go()


def test_a_store_that_refuses_for_good_ends_the_work_with_its_error(run):
    it = run(count=50, seconds=0.02)
    it.depot.ended.append(Failed("unit-000", StoreFailed("s3://b: no permission", False)))
    it.depot.recovered["unit-000"] = Stat(7, 0)
    with pytest.raises(StoreFailed, match="no permission"):
        it.go()
    assert it.depot.calls["admit"] == 0


@pytest.mark.parametrize("isolate", [True, False])
def test_a_unit_whose_bytes_went_bad_on_the_way_is_made_again(run, isolate):
    it = run(count=1)
    it.depot.hold_back = True

    def made(key: str, stat: Stat) -> None:
        it.depot.made = original  # type: ignore[method-assign]
        it.depot.held.pop(key)
        it.depot.hold_back = False
        it.depot.ended.append(Failed(key, IntegrityError("other bytes in the store")))

    original, it.depot.made = it.depot.made, made  # type: ignore[method-assign]
    outcome = it.go(Policy(workers=2, backoff=0.01, isolate=isolate))
    assert outcome == Outcome(verified=1, redone=1)
    assert "other bytes" in it.told("failed_unit")[0]["reason"]
    assert it.depot.abandoned == []


@pytest.mark.parametrize("isolate", [True, False])
def test_what_an_earlier_process_made_is_waited_for_and_not_made_again(run, isolate):
    it = run(count=3)
    task = units.tasks(3)[1]
    stat = Stat(len(units.content(task)), units.crc64(units.content(task)))
    it.depot.place(task.key).write_bytes(units.content(task))
    it.depot.recovered[task.key] = stat
    it.depot.on_the_way[task.key] = stat
    assert it.go(Policy(workers=2, isolate=isolate)) == Outcome(verified=3)
    assert it.made["unit-001"] is None
    assert not (it.folder / "handed-1").exists()
    it.assert_verified_once()


def test_equal_keys_are_refused(run):
    it = run()
    tasks = units.tasks(2) + units.tasks(1)
    with pytest.raises(ValueError, match="unit-000 is among the tasks twice"):
        supervise(units.unit_worker, it.plan, tasks, it.depot, policy=QUICK, on_verified=print)


def test_what_cannot_be_sent_to_a_worker_is_named(run):
    it = run()
    task = Task(0, "unit-000", 1, 1, lambda: None)
    depot, more = it.depot, {"policy": QUICK, "on_verified": print}
    with pytest.raises(WorkerFailed, match=r"unit-000 \(1 tokens\) cannot be sent to a worker"):
        supervise(units.unit_worker, it.plan, [task], depot, **more)
    with pytest.raises(WorkerFailed, match="the setup function and its payload cannot be sent"):
        supervise(lambda *_: None, it.plan, [task], depot, **more)


def test_the_last_unit_does_not_wait_for_a_worker_that_hangs_in_its_setup(run):
    it = run(count=2, how={0: "exit", 1: "exit"}, times=1, setup={0: "hang"})
    it.plan.setup[1] = ""
    # Worker 1 dies over both units, while worker 0 never gets ready.
    assert it.go().verified == 2
    assert it.handed(0) == it.handed(1) == [1, 1]


def test_an_error_of_a_callback_ends_everything(run):
    it = run()

    def at_verified(task: Task) -> None:
        raise ZeroDivisionError

    it.at_verified = at_verified
    with pytest.raises(ZeroDivisionError):
        it.go()


def test_inline_runs_here_counts_any_exception_and_restarts_nothing(run):
    it = run(how={1: "raise", 3: "own"}, times=1)
    outcome = it.go(Policy(isolate=False))
    assert outcome == Outcome(verified=6, redone=2)
    assert it.ticks[-1].redone == 2
    assert {made.info["pid"] for made in it.made.values()} == {os.getpid()}
    assert [f["reason"] for f in it.told("failed_unit")] == [
        "ValueError: unit-1 is bad",
        "TargetError: unit-3: not finite",
    ]
    it.assert_verified_once()
    states = [w.state for s in it.ticks for w in s.workers]
    assert {"warming", "capturing"} <= set(states)
    it = run(how={1: "raise"}, times=99)
    assert list(it.go(Policy(isolate=False)).quarantined) == ["unit-001"]
    it = run(setup={0: "raise"}, times=99)
    with pytest.raises(WorkerFailed, match="setting up failed: ValueError: setup-0 is bad"):
        it.go(Policy(isolate=False))


@pytest.mark.parametrize("how", ["fifo", "pipe"])
def test_incident_io_that_never_returns_is_reported_and_the_others_finish(run, how):
    """The unit's first worker hangs in a real call; nobody else does, and the end does not."""
    it = run(count=8, how={1: how}, seconds=0.05)
    policy = Policy(workers=2, backoff=0.01, stuck_after=1.0, kill_after=2.0)
    verified: dict[str, int] = {}

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        verified[fields.get("what", kind)] = len(it.made)

    it.at_event = at_event
    started = time.monotonic()
    outcome = it.go(policy)
    assert time.monotonic() - started < 15
    assert outcome == Outcome(verified=8, redone=1, deaths=1)
    it.assert_verified_once()
    # It is killed when its unit is all that is left, and not before.
    assert verified["died"] == 7
    # On a busy machine a process may need so long to start that it is reported as well.
    (stuck,) = [f for f in it.told("stuck") if f["call"] != "unknown call"]
    assert stuck["call"] == {"fifo": "open", "pipe": "write"}[how]
    if how == "fifo":
        assert stuck["path"] == str(it.folder / "fifo-unit-1")
    assert stuck["worker"] == it.handed(1)[0]
    assert stuck["pid"] in {int(path.name.split("-")[1]) for path in it.folder.glob("pid-*")}
    assert stuck["process_state"] == "S"
    assert 1.0 <= stuck["seconds"] < 10.0
    (unstuck,) = [f for f in it.told("unstuck") if f["call"] != "unknown call"]
    assert unstuck["call"] == stuck["call"]
    assert len(set(it.handed(1))) == 2


def test_a_call_that_returns_after_all_is_told_and_nothing_is_made_again(run):
    it = run(count=4, how={0: "fifo"})

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if fields.get("call") == "open" and kind == "stuck":
            reader = Path(fields["path"]).open("rb")  # noqa: SIM115 - open until the end
            readers.append(reader)

    readers: list[Any] = []
    it.at_event = at_event
    outcome = it.go(Policy(workers=1, stuck_after=0.4))
    readers[0].close()
    assert outcome == Outcome(verified=4)
    told = [kind for kind, fields in it.events if fields.get("call") == "open"]
    assert told == ["stuck", "unstuck"]


@pytest.mark.parametrize("how", ["stop", "gil"])
def test_a_worker_without_a_sign_of_life_is_reported_with_its_state(run, how):
    it = run(count=6, how={0: how})
    policy = Policy(workers=2, backoff=0.01, stuck_after=0.8, kill_after=1.2)
    assert it.go(policy) == Outcome(verified=6, redone=1, deaths=1)
    stuck = it.told("stuck")[-1]
    assert stuck["call"] == "unknown call"
    assert stuck["worker"] == it.handed(0)[0]
    assert stuck["process_state"] == {"stop": "T", "gil": "S"}[how]
    assert stuck["seconds"] >= 0.8


def test_who_falls_silent_in_a_call_that_may_take_long_is_told_with_it(run):
    it = run(count=6, how={0: "long gil"})
    policy = Policy(workers=2, backoff=0.01, stuck_after=0.8, kill_after=1.2)
    assert it.go(policy) == Outcome(verified=6, redone=1, deaths=1)
    stuck = it.told("stuck")[-1]
    assert (stuck["call"], stuck["path"]) == ("load", str(it.folder))
    assert it.ticks[-1].redone == 1


def test_a_call_that_may_take_long_is_told_when_that_is_over(run):
    it = run(count=1, how={0: "long"})
    it.go(Policy(workers=1, stuck_after=0.5))
    assert not [f for f in it.told("stuck") if f["call"] == "load"]
    told: list[tuple[str, dict[str, Any]]] = []
    calls = StuckCalls(0, os.getpid(), 0.5, lambda kind, fields: told.append((kind, fields)))
    calls.look([Ongoing(1, "load", "/target", 10.4, slack=10.0)])
    assert not told
    calls.look([Ongoing(1, "load", "/target", 10.5, slack=10.0)])
    assert told[0][1]["call"] == "load"


def test_a_stuck_worker_is_not_killed_while_there_is_no_other_to_make_its_unit(run):
    it = run(count=1, how={0: "fifo"})
    policy = Policy(workers=1, stuck_after=0.2, kill_after=0.3)
    fifo = it.folder / "fifo-unit-0"

    def release(kind: str, fields: dict[str, Any]) -> None:
        if fields.get("call") == "open" and kind == "stuck":
            threading.Timer(1.0, lambda: readers.append(fifo.open("rb"))).start()

    readers: list[Any] = []
    it.at_event = release
    assert it.go(policy) == Outcome(verified=1)
    readers[0].close()


def test_this_process_s_own_frozen_call_is_reported_from_another_thread(run, caplog):
    """Here a journal on a FIFO: its open does not return, and the loop stands still."""
    it = run(count=2)
    fifo = it.folder / "journal"
    os.mkfifo(fifo)
    watch = IoWatch()
    told_by: list[str] = []

    def made(key: str, stat: Stat) -> None:
        it.depot.made = original  # type: ignore[method-assign]
        with watch.call("open", fifo), fifo.open("wb"):
            original(key, stat)

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "stuck" and fields["worker"] is None:
            told_by.append(threading.current_thread().name)
            readers.append(fifo.open("rb"))

    readers: list[Any] = []
    original, it.depot.made = it.depot.made, made  # type: ignore[method-assign]
    it.at_event = at_event
    assert it.go(Policy(workers=1, stuck_after=0.4), watch=watch).verified == 2
    readers[0].close()
    assert told_by == ["paceline-io-watch"]
    (stuck,) = [f for f in it.told("stuck") if f["worker"] is None]
    assert (stuck["worker"], stuck["pid"], stuck["call"]) == (None, os.getpid(), "open")
    assert stuck["path"] == str(fifo)
    wait_until(lambda: it.told("unstuck"), 5)
    assert f"the supervisor (process {os.getpid()}): open on {fifo}" in caplog.text


def test_a_call_of_the_depot_that_hangs_is_named_without_any_watch_of_its_own(run):
    it = run(count=1)
    original = it.depot.admit

    def admit(key: str, num_bytes: int) -> Wait | None:
        wait_until(lambda: [f for f in it.told("stuck") if f["worker"] is None])
        return original(key, num_bytes)

    it.depot.admit = admit  # type: ignore[method-assign]
    it.go(Policy(workers=1, stuck_after=0.2))
    (stuck,) = [f for f in it.told("stuck") if f["worker"] is None]
    assert (stuck["call"], stuck["path"]) == ("reserve room", "unit-000")


def test_the_end_does_not_wait_for_what_the_kernel_holds(run, monkeypatch):
    """No process here can be put into state D, so one that nobody kills stands for it."""
    it = run(count=2, setup={1: "hang"}, times=99)
    left: list[Any] = []
    monkeypatch.setattr(supervisor, "_GRACE", 0.2)
    real = supervisor.end_children

    def end_children(children: Any, seconds: float) -> list[Any]:
        children = list(children)
        left.extend(children[1:])
        return real(children[:1], seconds) + children[1:]

    monkeypatch.setattr(supervisor, "end_children", end_children)
    monkeypatch.setattr(sys.modules[__name__], "workers_of", lambda _: [])
    it.depot.wait = Wait("", "space", time.time())

    def at_tick(snapshot: Snapshot) -> None:
        if all((it.folder / f"wrong-setup-{n}").exists() for n in (1,)):
            it.depot.wait = None

    it.at_tick = at_tick
    started = time.monotonic()
    outcome = it.go(Policy(workers=2))
    assert outcome.verified == 2
    assert time.monotonic() - started < 10
    (told,) = it.told("worker", "left")
    assert told["number"] == 1
    assert "still there" in told["how"]
    for child in left:
        child.kill()
        child.wait(5)


def test_uploads_wake_the_loop_by_the_waker(run):
    it = run(count=3, seconds=0.0)
    waker = Waker()
    it.depot.hold_back = True

    def release() -> None:
        it.depot.hold_back = False
        ends.append(time.monotonic())
        waker()

    ends: list[float] = []
    original = it.depot.made

    def made(key: str, stat: Stat) -> None:
        original(key, stat)
        if len(it.depot.on_the_way) == 3:
            threading.Timer(0.5, release).start()

    it.depot.made = made  # type: ignore[method-assign]
    it.at_verified = lambda _: ends.append(time.monotonic())
    it.go(waker=waker)
    waker.close()
    assert ends[1] - ends[0] < 0.1


def test_the_supervisor_sleeps_while_workers_work(run):
    it = run(count=2, seconds=1.5)
    used: list[float] = []

    def at_tick(snapshot: Snapshot) -> None:
        if all(w.state == "capturing" for w in snapshot.workers):
            used.append(time.process_time())

    it.at_tick = at_tick
    it.go()
    assert used[-1] - used[0] < 0.02 * 1.5


def _start(folder: Path, count: int, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, units.__file__, str(folder), str(count), str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_lets_units_in_work_be_finished_and_kept(tmp_path, number):
    parent = _start(tmp_path, 40, 0.5)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        time.sleep(0.1)
        os.killpg(parent.pid, number)
        time.sleep(0.05)
        os.killpg(parent.pid, number)  # at once: the same request
        out, err = parent.communicate(timeout=30)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == 130
    begun = {int(path.name.split("-")[1]) for path in tmp_path.glob("handed-*")}
    verified = {int(n) for n in re.findall(r"verified unit-(\d+)", out)}
    assert begun == verified
    assert len(begun) <= 3
    assert f"{number.name}: stopped; {40 - len(begun)} of 40 units are left" in out
    assert "Traceback" not in err


def test_a_second_signal_ends_at_once(tmp_path):
    parent = _start(tmp_path, 4, 60.0)
    try:
        wait_until(lambda: len(list(tmp_path.glob("handed-*"))) == 2)
        children = workers_of(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert parent.poll() is None
        parent.send_signal(signal.SIGTERM)
        parent.communicate(timeout=5)
        assert parent.returncode not in (0, None)
        assert not any(child.is_running() for child in children)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
@pytest.mark.parametrize("moment", ["spawning", "starting", "setup", "work"])
def test_no_worker_outlives_a_supervisor_that_is_killed_at_any_moment(tmp_path, moment):
    parent = _start(tmp_path, 1000 if moment == "setup" else 40, 30.0)
    process = psutil.Process(parent.pid)
    try:
        if moment == "spawning":
            # With the first process and before the second.
            wait_until_busy(lambda: process.children())
        elif moment == "starting":
            wait_until_busy(lambda: len(process.children()) == 2)
        else:
            marks = "wrong-setup-1" if moment == "setup" else "handed-*"
            wanted = 1 if moment == "setup" else 2
            wait_until(lambda: len(list(tmp_path.glob(marks))) == wanted)
        children = process.children(recursive=True)
        assert children
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(_is_alive(child) for child in children), 5)
        # One that was being born is found by its command line.
        assert not [p for p in psutil.process_iter() if _is_child_of(p, parent.pid)]
    finally:
        parent.kill()
        parent.communicate()


def wait_until_busy(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_child_of(process: psutil.Process, parent: int) -> bool:
    try:
        command = process.cmdline()
        is_worker = any(part.startswith("paceline-worker-") for part in command)
        return is_worker and str(parent) in command and _is_alive(process)
    except psutil.Error:
        return False


@pytest.fixture
def killer():
    """Kills a random worker of this process now and then, `wanted` in all."""
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def start(wanted: int) -> list[int]:
        seed = random.SystemRandom().randrange(1 << 32)
        print("seed", seed)
        chance = random.Random(seed)
        kills: list[int] = []

        def kill() -> None:
            while len(kills) < wanted and not is_over.wait(chance.uniform(0.02, 0.2)):
                found = [p for p in workers_of(psutil.Process()) if _is_alive(p)]
                if found:
                    victim = chance.choice(sorted(found, key=lambda p: p.pid))
                    victim.kill()
                    kills.append(victim.pid)

        threads.append(threading.Thread(target=kill))
        threads[0].start()
        return kills

    yield start
    is_over.set()
    for thread in threads:
        thread.join()


PATIENT = Policy(workers=3, backoff=0.005, restarts=1000, unit_retries=100)


def test_twenty_random_kills_lose_nothing_double_nothing_and_redo_one_unit_each(run, killer):
    it = run(count=150, seconds=0.02)
    it.depot.limit = 1000
    kills = killer(20)
    it.at_verified = lambda _: time.sleep(0.02)
    outcome = it.go(PATIENT)
    it.assert_verified_once()
    assert outcome.verified == 150
    assert len(kills) == 20
    assert outcome.redone <= outcome.deaths <= 20
    handed = sum(len(it.handed(i)) for i in range(150))
    assert handed <= 150 + 20
    assert it.depot.held == {}


@pytest.mark.parametrize("kind", ["local", "staged"])
def test_the_real_depots_hold_every_unit_once_after_kills(run, killer, kind):
    it = run(count=60, seconds=0.02)
    store = LocalStore(it.folder / "kept")
    watch, waker = IoWatch(), Waker()
    fs = WatchedFs(REAL_FS, watch)
    with Journal(it.folder / "journal", fs=fs) as journal:
        if kind == "local":
            depot: Depot = LocalDepot(store, journal, "f", fs=fs, samples=lambda _: 1)
        else:
            depot = StagedDepot(
                store,
                Staging(it.folder / "staging", it.folder),
                journal,
                "f",
                Budget(1000),
                Uploader(store, concurrency=2, wake=waker),
                samples=lambda _: 1,
                high=0.999,
                low=0.998,
            )
        it.depot = depot  # type: ignore[assignment]
        kills = killer(6)
        outcome = it.go(PATIENT, watch=watch, waker=waker)
        depot.close()
        records = [r["key"] for r in journal.records if r["kind"] == "verified"]
    waker.close()
    assert kills
    assert (outcome.verified, outcome.quarantined) == (60, {})
    assert outcome.redone <= outcome.deaths <= len(kills)
    tasks = units.tasks(60)
    assert sorted(records) == [task.key for task in tasks]
    assert [listed.key for listed in store.list("")] == [task.key for task in tasks]
    for task in tasks:
        assert store.path(task.key).read_bytes() == units.content(task)
    assert list(it.folder.rglob("*.partial")) == []


@pytest.mark.parametrize("isolate", [True, False])
def test_a_signal_does_not_wait_for_a_store_that_gives_no_answer(run, isolate, monkeypatch, caplog):
    """What is made lies in staging, whole: the next start goes on with it."""
    monkeypatch.setattr("paceline.flow.work._STOPPING", 0.5)
    it = run(count=6, limit=300)
    it.depot.hold_back = True

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "waiting":
            os.kill(os.getpid(), signal.SIGTERM)

    it.at_event = at_event
    began = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM: stopped; 6 of 6 units are left"):
        it.go(Policy(workers=2, isolate=isolate, backoff=0.01))
    assert time.monotonic() - began < 20.0
    assert it.depot.pending == 3
    assert not it.depot.abandoned
    assert "3 units are made and not confirmed" in caplog.text


def test_a_signal_waits_while_the_store_goes_on_confirming(run, monkeypatch):
    monkeypatch.setattr("paceline.flow.work._STOPPING", 1.0)
    it = run(count=6, limit=300)
    it.depot.hold_back = True
    poll, due = it.depot.poll, [0.0]

    def slow_poll() -> Any:
        """One unit each half a second, once the signal has come."""
        if due[0] and time.monotonic() > due[0] and it.depot.on_the_way:
            due[0] = time.monotonic() + 0.5
            key, stat = next(iter(it.depot.on_the_way.items()))
            del it.depot.on_the_way[key]
            it.depot.verified[key] += 1
            it.depot.ended.append(Verified(key, stat))
        return poll()

    def at_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "waiting":
            due[0] = time.monotonic() + 0.5
            os.kill(os.getpid(), signal.SIGTERM)

    it.depot.poll = slow_poll
    it.at_event = at_event
    with pytest.raises(Interrupted, match="3 of 6 units are left"):
        it.go(Policy(workers=1, isolate=False))
    assert sum(it.times.values()) == 3
