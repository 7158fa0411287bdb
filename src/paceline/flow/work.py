"""The units of a call: which is next, which are waited for, which are given up."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.durable.depot import Depot, Verified
from paceline.durable.depot import Failed as DepotFailed
from paceline.durable.errors import (
    IntegrityError,
    PacelineError,
    StorageRefused,
    UserError,
    storage_refused,
)
from paceline.durable.iowatch import IoWatch
from paceline.durable.stalls import Wait
from paceline.flow.messages import summary_of
from paceline.flow.units import Callbacks, Made, Policy, Snapshot, Task, WorkerView, check_tasks

_LOG = logging.getLogger(__name__)


_STOPPING = 60.0
"""Seconds without a unit stored after which a signal's end does not wait for the others."""

_REFUSED = 5.0
"""The same where the store or the journal's disk refuses, and has for a while."""


@dataclass
class Entry:
    """A unit, and what has happened to it."""

    task: Task
    reasons: list[str] = field(default_factory=list)
    """One for each failure or death over it."""
    avoid: int | None = None
    """The worker that failed at it last."""
    was_lost: bool = False
    made: Made | None = None


class Work:
    """All state of the units; every call into the depot and out to the caller goes through here.

    Each of them is known to `watch`: what does not return is then reported by another thread.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        depot: Depot,
        policy: Policy,
        callbacks: Callbacks,
        watch: IoWatch,
    ) -> None:
        check_tasks(tasks)
        made_before = depot.recovered
        # The next is the last, so that taking one costs nothing, be there a million.
        self._queue = [Entry(task) for task in reversed(tasks) if task.key not in made_before]
        self._waited_for = {task.key: Entry(task) for task in tasks if task.key in made_before}
        self._depot = depot
        self._policy = policy
        self._callbacks = callbacks
        self._watch = watch
        self._waiting: Wait | None = None
        self._stored_at = 0.0
        self.total = len(tasks)
        self.verified = 0
        self.redone = 0
        self.quarantined: dict[str, str] = {}
        self.error: PacelineError | None = None
        """Why no more units are handed out, where it is not for a signal."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next unit has no room yet."""
        return self._waiting is not None

    @property
    def queued(self) -> int:
        """Units that nobody has."""
        return len(self._queue)

    @property
    def is_settled(self) -> bool:
        """Whether everything made is verified, or failed."""
        return not self._waited_for and not self._depot.pending

    def may_stop(self) -> bool:
        """After a signal, with nothing in work: whether to wait no longer for what is made.

        What is made lies there, whole: where store or journal give no answer, the next start goes
        on with it.
        """
        now = time.monotonic()
        self._stored_at = self._stored_at or now
        seconds = now - self._stored_at
        waiting = self._depot.waiting
        is_refused = waiting is not None and waiting.kind in ("store", "journal")
        patience = _REFUSED if is_refused else _STOPPING
        if self.is_settled or seconds < patience:
            return self.is_settled
        _LOG.warning(
            "%d units are made and not confirmed, and none was within %.0f seconds: the next "
            "start goes on with them",
            *(self._depot.pending, seconds),
        )
        return True

    @property
    def left(self) -> int:
        """Units neither verified nor quarantined."""
        return self.total - self.verified - len(self.quarantined)

    def take(self, worker: int, *, has_others: bool) -> Entry | None:
        """The next unit for a worker, its bytes reserved; None where there is none for it now.

        A unit that this worker failed at is left to another one, where `has_others`. Raises
        UserError for one that the depot could never take.
        """
        place = self._place_of_next(worker, has_others)
        if place is None:
            return None
        entry = self._queue[place]
        try:
            with self._watch.call("reserve room", entry.task.key):
                wait = self._depot.admit(entry.task.key, entry.task.num_bytes)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._tell_waiting(wait)
        if wait is not None:
            return None
        del self._queue[place]
        self.redone += entry.was_lost
        return entry

    def path_of(self, entry: Entry) -> Path:
        """Where the worker writes it."""
        with self._watch.call("choose a place", entry.task.key):
            return self._depot.place(entry.task.key)

    def finish(self, entry: Entry, made: Made) -> None:
        """A worker has written it."""
        entry.made = made
        self._waited_for[entry.task.key] = entry
        with self._watch.call("record", entry.task.key):
            self._depot.made(entry.task.key, made.stat)

    def lose(self, entry: Entry, reason: str, worker: int) -> None:
        """A worker has died or failed over it: to the front of the queue, or into quarantine."""
        with self._watch.call("clean up", entry.task.key):
            self._depot.abandon(entry.task.key)
        self._failed(entry, reason, worker)

    def refuse(self, entry: Entry, error: OSError) -> None:
        """The worker's disk had no room for it, which is not the unit's fault: to the front.

        When it is handed out again is for the depot to say.
        """
        with self._watch.call("clean up", entry.task.key):
            self._depot.refused(entry.task.key, error)
        self._queue.append(entry)

    def collect(self) -> None:
        """Take what the depot has verified, or failed to; and whether it has waited too long."""
        with self._watch.call("poll"):
            ended = self._depot.poll()
        for item in ended:
            entry = self._waited_for.pop(item.key, None)
            if entry is None:
                _LOG.warning("%s: the depot tells of a unit that is not among the tasks", item.key)
            elif isinstance(item, Verified):
                self.verified += 1
                self._stored_at = time.monotonic() if self._stored_at else 0.0
                with self._watch.call("note", item.key):
                    self._callbacks.on_verified(entry.task, entry.made, item.stat)
            else:
                self._upload_failed(entry, item)
        with self._watch.call("poll"):
            reason = self._depot.overdue()
        if reason is not None:
            self.fail(StorageRefused(reason))
        if not self._queue or self.error is not None:
            # Nobody asks for room any more, and what is made may still have to wait.
            self._tell_waiting(self._depot.waiting)

    def fail(self, error: PacelineError) -> None:
        """Hand out no more; the first error stays."""
        if self.error is None:
            _LOG.error("no more units are begun: %s", error)
            self.error = error

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Pass an event on."""
        with self._watch.call("write an event", kind):
            self._callbacks.on_event(kind, fields)

    def tick(self, workers: Iterable[WorkerView]) -> None:
        """Pass on how things stand."""
        with self._watch.call("read meters"):
            meters = self._depot.meters()
        with self._watch.call("write progress"):
            self._callbacks.on_tick(Snapshot(tuple(workers), meters, self.redone))

    def _place_of_next(self, worker: int, has_others: bool) -> int | None:
        for place in range(len(self._queue) - 1, -1, -1):
            if self._queue[place].avoid != worker or not has_others:
                return place
        return None

    def _tell_waiting(self, wait: Wait | None) -> None:
        before, self._waiting = self._waiting, wait
        if wait is not None and (before is None or before.kind != wait.kind):
            self.tell("waiting", {"kind": wait.kind, "reason": wait.reason})
        elif wait is None and before is not None:
            seconds = round(time.time() - before.since, 1)
            self.tell("going_on", {"kind": before.kind, "seconds": seconds})

    def _failed(self, entry: Entry, reason: str, worker: int | None) -> None:
        key = entry.task.key
        entry.made = None
        entry.reasons.append(reason)
        entry.avoid = worker
        entry.was_lost = True
        times = len(entry.reasons)
        self.tell("failed_unit", {"key": key, "reason": reason, "worker": worker, "times": times})
        if times < self._policy.unit_retries:
            self._queue.append(entry)
            return
        self.quarantined[key] = reason
        _LOG.error("%s is quarantined after %d failures, the last: %s", key, times, reason)
        self.tell("quarantined", {"key": key, "reason": reason})

    def _upload_failed(self, entry: Entry, failed: DepotFailed) -> None:
        error = failed.error
        if isinstance(error, IntegrityError):
            self._failed(entry, summary_of(error), None)
            return
        # A fault of the store hits every unit alike: making this one again would not help.
        if not isinstance(error, PacelineError):
            refused = storage_refused(error) if isinstance(error, OSError) else None
            error = refused or StorageRefused(f"{failed.key}: {summary_of(error)}")
        self.fail(error)
