"""The supervisor: hands units to worker processes, and outlives whatever happens to them."""

import logging
import pickle
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.durable.depot import Depot
from paceline.durable.errors import WorkerFailed
from paceline.durable.iowatch import IoWatch
from paceline.durable.store import Stat
from paceline.flow.crew import Phase, Worker, code_error, setup_error
from paceline.flow.inline import make_inline
from paceline.flow.messages import (
    Beat,
    Failed,
    Finished,
    Hello,
    Raised,
    Ready,
    Refused,
    Told,
    sendable,
    summary_of,
)
from paceline.flow.process import end_children
from paceline.flow.signals import Stop, signals_noted
from paceline.flow.stuck import OwnWatch
from paceline.flow.units import (
    DRAINING,
    IDLE,
    WAITING,
    Callbacks,
    Made,
    Outcome,
    Policy,
    Setup,
    Snapshot,
    Task,
)
from paceline.flow.waker import Waker
from paceline.flow.work import Work

_LOG = logging.getLogger(__name__)

_TICK = 1.0
_GLANCE = 0.2
"""Seconds between two looks for a signal, which does not end a wait."""

_BUSY_GLANCE = 0.05
"""Seconds between two looks at what tells nobody when it is done: uploads, dying processes."""

_GRACE = 1.0
"""Seconds in which killed workers are gone, unless the kernel holds them."""


def supervise(
    setup: Setup,
    payload: Any,
    tasks: Sequence[Task],
    depot: Depot,
    *,
    policy: Policy,
    on_verified: Callable[[Task, Made | None, Stat], None],
    on_event: Callable[[str, dict[str, Any]], None] = lambda _kind, _fields: None,
    on_tick: Callable[[Snapshot], None] = lambda _: None,
    watch: IoWatch | None = None,
    waker: Waker | None = None,
) -> Outcome:
    """Have every task made by workers, and kept by the depot; returns when all are verified.

    Each worker calls `setup(payload, context)`, a module's top-level function, once, and then
    what it returned as `handle(task, path)` for one unit after the other, in the order of `tasks`.
    A unit is handed out once the depot has admitted it. Tasks in `depot.recovered` are not made
    again, only waited for.

    A worker that dies, or raises what Paceline does not raise on purpose, is started again after
    a growing pause; its unit goes to the front, to another worker where there is one. So at most
    one unit per worker is made again per death. An error raised on purpose is a failure of the
    unit and leaves the worker. After `unit_retries` of either the unit is quarantined and the
    others go on. No room on the worker's disk (ENOSPC, EDQUOT) is neither: the depot says when to
    go on. One that ends in its setup counts for no unit; after a UserError there, or in a process
    that has loaded other code, no more units are begun.

    `on_verified(task, made, stat)` is called for each verified unit, `made` is None for those
    recovered; it and `on_tick`, called about once a second and when a worker's state changes, run
    in the calling thread. So does `on_event`, but for reports of this process's own calls that do
    not return (`stuck`, `unstuck`): they come from another thread, so it must be thread-safe. Its
    kinds and fields:

    - `worker`: `number`, `pid`, `what` (`started`, `died`, `restarted`, `gave_up`, `left`), `how`
    - `stuck`: `worker` (None for this process), `pid`, `call`, `path`, `seconds`,
      `process_state`; `unstuck`: the same without the state
    - `waiting`: `kind` and `reason` of the depot's wait; `going_on`: `kind`, `seconds`
    - `failed_unit`: `key`, `reason`, `worker`, `times`; `quarantined`: `key`, `reason`

    Calls are stuck after `policy.stuck_after` seconds. Of this process those are known that run
    inside `watch.call` (hand the depot a `WatchedFs` with the same watch), and every call of the
    depot and the callbacks. Calls of `waker`, from any thread, have the depot polled at once.

    After SIGTERM or SIGINT no unit is begun, those in work are finished, except by workers that
    are stuck, and uploaded as long as the store takes them, and Interrupted is raised; another
    signal raises KeyboardInterrupt.
    Raises StorageRefused where the depot is overdue, StoreFailed where a store refuses for good,
    UserError for a worker of other code and what a setup raises of that kind, such as for a device
    that is not there, all of them after the units in work are finished; WorkerFailed when every
    worker has given up, and for what cannot be sent to one; UserError for a unit that the depot
    could never take; ValueError for a policy or tasks that make no sense. An exception of a
    callback ends everything as it is. Whatever ends this call, its workers have been killed, and
    they die with this process, or the calling thread, however it dies; one that the kernel does
    not let go is named and left.
    """
    if policy.workers < 1 or policy.threads < 1 or policy.unit_retries < 1:
        raise ValueError(f"supervise: workers, threads and unit_retries are 1 or more: {policy}")
    callbacks = Callbacks(on_verified, on_event, on_tick)
    watch = watch or IoWatch()
    work = Work(tasks, depot, policy, callbacks, watch)
    with OwnWatch(watch, policy.stuck_after, on_event):
        if not policy.isolate:
            return make_inline(setup, payload, work, policy, watch)
        job = sendable((setup, payload), "the setup function and its payload")
        with signals_noted("the units in work and on their way") as stop:
            supervisor = _Supervisor(job, work, policy, stop, watch, waker)
            try:
                supervisor.run()
            finally:
                supervisor.end()
            return supervisor.outcome()


class _Supervisor:
    def __init__(
        self,
        job: bytes,
        work: Work,
        policy: Policy,
        stop: Stop,
        watch: IoWatch,
        waker: Waker | None,
    ) -> None:
        self._job = job
        self._work = work
        self._policy = policy
        self._stop = stop
        self._watch = watch
        self._waker = waker
        count = min(len(policy.devices) or policy.workers, work.total)
        self._workers = [Worker(number, policy, work.tell) for number in range(count)]
        self._deaths = 0
        self._ticked = 0.0
        self._selector = selectors.DefaultSelector()
        if waker is not None:
            self._selector.register(waker, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until everything is done that can be."""
        while True:
            self._work.collect()
            self._mind()
            self._hand_out()
            self._tick()
            if self._is_over():
                return
            self._listen()

    def outcome(self) -> Outcome:
        """What it came to; raises what `supervise` promises."""
        work = self._work
        work.tick([])
        if work.error is not None:
            raise work.error
        if self._stop.asked:
            raise self._stop.interrupted(f"stopped; {work.left:,} of {work.total:,} units are left")
        if work.left:
            causes = "\n".join(f"worker {w.number}: {w.cause}" for w in self._workers)
            raise WorkerFailed(
                f"every worker has given up, after {self._policy.restarts} restarts within "
                f"{self._policy.restart_window:.0f} seconds; {work.left:,} of {work.total:,} units "
                f"are left. Their last causes:\n{causes}"
            )
        return Outcome(work.verified, dict(work.quarantined), work.redone, self._deaths)

    def end(self) -> None:
        """Kill all workers; what the kernel holds is named and left."""
        self._selector.close()
        running = {w.running.child.pid: w for w in self._workers if w.running}
        children = [w.running.child for w in running.values() if w.running]
        for child in end_children(children, _GRACE):
            worker = running.pop(child.pid)
            how = f"killed, and still there after {_GRACE:.0f} s: the kernel holds it in a call"
            _LOG.warning("%s: %s; left behind", worker.name, how)
            self._tell_worker(worker, "left", how)
        for worker in running.values():
            worker.bury_for_good()

    @property
    def _is_closing(self) -> bool:
        """Whether no more units are handed out."""
        return self._stop.asked or self._work.error is not None

    def _is_over(self) -> bool:
        if any(w.phase is Phase.WORKING and not w.stuck_seconds for w in self._workers):
            return False
        if self._work.error is not None:
            return True
        if self._stop.asked:
            return self._work.may_stop()
        if not self._work.is_settled:
            return False
        if all(w.phase is Phase.GONE for w in self._workers):
            return True
        return not self._work.queued and all(w.entry is None for w in self._workers)

    def _listen(self) -> None:
        """Wait for a message, or until something is due."""
        now = time.monotonic()
        timeout = _GLANCE
        is_uploading = self._waker is None and not self._work.is_settled
        is_burying = any(w.phase is Phase.ENDING for w in self._workers)
        if is_uploading or is_burying or self._work.is_waiting:
            timeout = _BUSY_GLANCE
        due = [w.due - now for w in self._workers if self._is_needed(w)]
        timeout = max(0.0, min([timeout, *due]))
        for key, events in self._selector.select(timeout):
            worker = key.data
            if worker is None:
                key.fileobj.clear()  # type: ignore[union-attr]
            elif worker.running is not None:
                self._hear(worker, events)

    def _hear(self, worker: Worker, events: int) -> None:
        assert worker.running is not None
        mailbox = worker.running.mailbox
        if events & selectors.EVENT_WRITE:
            mailbox.flush()
        for data in mailbox.collect():
            if worker.phase is Phase.ENDING:
                return
            self._take_message(worker, data)
        if worker.phase is Phase.ENDING:
            return
        if mailbox.is_closed:
            self._end_worker(worker, "")
        else:
            wanted = selectors.EVENT_READ | selectors.EVENT_WRITE * mailbox.wants_to_send
            self._selector.modify(mailbox, wanted, worker)

    def _take_message(self, worker: Worker, data: bytes) -> None:
        assert worker.running is not None
        message = pickle.loads(data)
        worker.running.pulse.heard()
        match message:
            case Beat(calls):
                worker.running.pulse.calls(calls)
            case Told(state):
                worker.show(state)
            case Hello(code):
                if code != self._policy.code:
                    self._work.fail(code_error(worker.name, code, self._policy.code))
                    self._end_worker(worker, "it has loaded other code")
                else:
                    worker.running.mailbox.post(self._job)
            case Ready():
                worker.set_up()
            case Finished(made):
                self._finish(worker, made)
            case Refused(error):
                self._work.refuse(worker.take_back(), error)
            case Failed(summary):
                entry = worker.take_back()
                self._work.lose(entry, f"{summary}, in worker {worker.number}", worker.number)
            case Raised():
                self._raised(worker, message)

    def _finish(self, worker: Worker, data: bytes) -> None:
        try:
            made = pickle.loads(data)
        except Exception as error:  # noqa: BLE001
            summary = f"its result cannot be read: {summary_of(error)}"
            self._work.lose(worker.take_back(), summary, worker.number)
            return
        # Recorded before the next one is handed out: so a death of this process costs one unit
        # per worker, not two.
        self._work.finish(worker.take_back(), made)
        worker.succeeded()

    def _raised(self, worker: Worker, raised: Raised) -> None:
        error = setup_error(raised.error) if raised.doing == "the setup" else None
        if error is not None:
            # Others may be at work: what they make is kept.
            error.add_note(f"in {worker.name}, while setting up")
            self._work.fail(error)
        else:
            _LOG.warning("%s:\n%s", worker.name, raised.trace.rstrip())
        self._end_worker(worker, f"{raised.doing} failed: {raised.summary}")

    def _end_worker(self, worker: Worker, cause: str) -> None:
        assert worker.running is not None
        self._selector.unregister(worker.running.mailbox)
        worker.end(cause)

    def _mind(self) -> None:
        """Start those that are due, bury those that are gone, kill those that are in the way."""
        for worker in self._workers:
            if worker.phase is Phase.ENDING and worker.has_ended():
                self._bury(worker)
            elif self._is_needed(worker) and time.monotonic() >= worker.due:
                self._start(worker)
            elif worker.phase is Phase.WORKING and self._is_in_the_way(worker):
                how = f"killed after {worker.stuck_seconds:.0f} seconds in a call"
                self._end_worker(worker, how)

    def _is_needed(self, worker: Worker) -> bool:
        """Whether a worker is to be started when it may: there is, or may be, a unit for it."""
        if self._is_closing or worker.phase is not Phase.ABSENT:
            return False
        # Who is starting does not count: nobody knows whether it gets ready.
        free = sum(w.phase is Phase.IDLE for w in self._workers)
        stuck = sum(w.phase is Phase.WORKING and bool(w.stuck_seconds) for w in self._workers)
        return self._work.queued + stuck > free

    def _is_in_the_way(self, worker: Worker) -> bool:
        """Whether a stuck worker's unit is all that is left, and another could make it."""
        if self._is_closing or worker.stuck_seconds < self._policy.kill_after:
            return False
        others = [w for w in self._workers if w is not worker]
        is_last = not self._work.queued and not any(w.entry and w.is_ready for w in others)
        return is_last and any(w.is_ready for w in others)

    def _start(self, worker: Worker) -> None:
        is_first = worker.starts == 0
        try:
            with self._watch.call("start a process", worker.name):
                running = worker.start()
        except OSError as error:
            worker.cause = f"the system starts no process: {summary_of(error)}"
            self._told_of_death(worker, worker.plan_restart())
            return
        self._selector.register(running.mailbox, selectors.EVENT_READ, worker)
        how = "" if is_first else f"after: {worker.cause}"
        self._tell_worker(worker, "started" if is_first else "restarted", how)

    def _bury(self, worker: Worker) -> None:
        entry = worker.take_back() if worker.entry is not None else None
        _LOG.warning("%s: %s", worker.name, worker.cause)
        self._tell_worker(worker, "died", worker.cause)
        name = worker.name
        self._told_of_death(worker, worker.bury())
        if entry is not None:
            self._work.lose(entry, f"{name}: {worker.cause}", worker.number)

    def _told_of_death(self, worker: Worker, pause: float | None) -> None:
        self._deaths += 1
        if pause is None:
            _LOG.error("worker %d gives up: %s", worker.number, worker.cause)
            self._tell_worker(worker, "gave_up", worker.cause)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.phase is not Phase.IDLE:
                continue
            entry = None
            if not self._is_closing:
                others = any(w.is_ready for w in self._workers if w is not worker)
                entry = self._work.take(worker.number, has_others=others)
            if entry is not None:
                worker.give(entry, self._work.path_of(entry))
                self._expect_writing(worker)
            elif self._is_closing or not self._work.queued:
                worker.show(DRAINING)
            else:
                worker.show(WAITING if self._work.is_waiting else IDLE)

    def _expect_writing(self, worker: Worker) -> None:
        assert worker.running is not None
        if worker.running.mailbox.wants_to_send:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(worker.running.mailbox, both, worker)

    def _tick(self) -> None:
        now = time.monotonic()
        is_due = now - self._ticked >= _TICK
        if is_due:
            for worker in self._workers:
                if worker.running is not None and worker.phase is not Phase.ENDING:
                    worker.running.pulse.sample()
        if is_due or any(worker.has_changed for worker in self._workers):
            self._ticked = now
            self._work.tick([worker.view() for worker in self._workers])

    def _tell_worker(self, worker: Worker, what: str, how: str) -> None:
        pid = worker.running.child.pid if worker.running else None
        fields = {"number": worker.number, "pid": pid, "what": what, "how": how}
        self._work.tell("worker", fields)
