"""Units made in this very process: for small targets and for debugging. Nothing is restarted."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.durable.errors import PacelineError, WorkerFailed, storage_refused
from paceline.durable.iowatch import IoWatch
from paceline.flow.messages import Failed, Refused, failure_of_unit, summary_of
from paceline.flow.signals import Stop, signals_noted
from paceline.flow.units import (
    CAPTURING,
    DRAINING,
    LOADING,
    WAITING,
    Handler,
    Outcome,
    Policy,
    Setup,
    WorkerContext,
    WorkerView,
)
from paceline.flow.work import Entry, Work

_PAUSE = 0.05
"""Seconds between two looks for room, or for the end of uploads."""

_TICK = 1.0


def make_inline(setup: Setup, payload: Any, work: Work, policy: Policy, watch: IoWatch) -> Outcome:
    """Like `supervise`, in the calling thread. Any exception over a unit is a failure of it.

    Raises WorkerFailed for a setup that fails with anything but an error of Paceline's. While it
    runs, signals are the caller's.
    """
    view = _View(work, policy)
    context = WorkerContext(0, watch, view.show)
    with _torch_threads(policy.threads):
        handle = _set_up(setup, payload, context) if work.queued else None
        with signals_noted("the unit in work and those on their way") as stop:
            while not _is_over(work, stop):
                if stop.asked or not work.queued:
                    view.show(DRAINING)
                    time.sleep(_PAUSE)
                    continue
                # An upload that fails brings back a unit where there were none to make.
                handle = handle or _set_up(setup, payload, context)
                _make_next(handle, work, context, view)
            work.tick([])
            if work.error is not None:
                raise work.error
            if stop.asked:
                raise stop.interrupted(f"stopped; {work.left:,} of {work.total:,} units are left")
    return Outcome(work.verified, dict(work.quarantined), work.redone)


def _is_over(work: Work, stop: Stop) -> bool:
    work.collect()
    if work.error is not None:
        return True
    if stop.asked:
        return work.may_stop()
    return work.is_settled and not work.queued


class _View:
    """Tells how things stand: when the state changes, and about once a second."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self._work = work
        self._device = policy.devices[0] if policy.devices else None
        self._state = LOADING
        self._since = time.time()
        self._ticked = 0.0
        self.unit: str | None = None

    def show(self, state: str) -> None:
        if state != self._state:
            self._state, self._since, self._ticked = state, time.time(), 0.0
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            view = WorkerView(0, os.getpid(), self._device, self._state, self.unit, self._since)
            self._work.tick([view])


def _set_up(setup: Setup, payload: Any, context: WorkerContext) -> Handler:
    try:
        return setup(payload, context)
    except PacelineError as error:
        error.add_note("while setting up")
        raise
    except Exception as error:
        refused = storage_refused(error) if isinstance(error, OSError) else None
        if refused is not None:
            raise refused from error
        raise WorkerFailed(f"setting up failed: {summary_of(error)}") from error


def _make_next(handle: Handler, work: Work, context: WorkerContext, view: _View) -> None:
    entry = work.take(0, has_others=False)
    if entry is None:
        view.show(WAITING)
        time.sleep(_PAUSE)
        return
    view.unit = entry.task.key
    context.state(CAPTURING)
    view.show(CAPTURING)
    _make(handle, entry, work)
    view.unit = None


def _make(handle: Handler, entry: Entry, work: Work) -> None:
    try:
        made = handle(entry.task, work.path_of(entry))
    except Exception as error:  # noqa: BLE001
        match failure_of_unit(error):
            case Refused(full):
                work.refuse(entry, full)
            case Failed(summary):
                work.lose(entry, summary, 0)
            case None:
                work.lose(entry, summary_of(error), 0)
    else:
        work.finish(entry, made)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
