"""Calls that do not return: told once when they have lasted too long, and once when they end."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.durable.iowatch import FreezeWatch, IoWatch, Ongoing, process_state

_LOG = logging.getLogger(__name__)

_JOIN = 1.0
"""Seconds that the end waits for a look that is going on."""

UNKNOWN = "unknown call"

Report = Callable[[str, dict[str, Any]], None]
"""Takes a kind, `stuck` or `unstuck`, and its fields."""

_Key = tuple[int, str, str]


class StuckCalls:
    """What of one process has been reported and has not ended."""

    def __init__(
        self, worker: int | None, pid: int, after: float, report: Report, name: str = ""
    ) -> None:
        """`name` is the worker's where it is more than a number."""
        self._worker, self._name = worker, name
        self._pid = pid
        self._after = after
        self._report = report
        self._reported: dict[_Key, tuple[Ongoing, float]] = {}

    @property
    def seconds(self) -> float:
        """How long the oldest reported call has lasted; 0 where there is none."""
        now = time.monotonic()
        return max((now - since for _, since in self._reported.values()), default=0.0)

    def look(self, calls: Sequence[Ongoing]) -> None:
        """Compare with what goes on now: report what is new and old enough, and what has ended."""
        old = {_key(call): call for call in calls if call.seconds >= self._after + call.slack}
        # One that goes on is old; a young one of the same name is the next.
        for key in [key for key in self._reported if key not in old]:
            self._end(key)
        for key, call in old.items():
            if key not in self._reported:
                self._reported[key] = (call, time.monotonic() - call.seconds)
                self._tell("stuck", call, call.seconds)

    def clear(self) -> None:
        """Report the end of all: the process is gone."""
        for key in list(self._reported):
            self._end(key)

    def _end(self, key: _Key) -> None:
        call, since = self._reported.pop(key)
        self._tell("unstuck", call, time.monotonic() - since)

    def _tell(self, kind: str, call: Ongoing, seconds: float) -> None:
        state = process_state(self._pid, call.thread_id or None) if kind == "stuck" else ""
        number = "the supervisor" if self._worker is None else f"worker {self._worker}"
        who = self._name or number
        where = f" on {call.path}" if call.path else ""
        if kind == "stuck":
            _LOG.warning(
                "%s (process %d): %s%s has not returned for %.0f seconds; process state %s",
                *(who, self._pid, call.what, where, seconds, state or "unknown"),
            )
        else:
            _LOG.warning(
                "%s (process %d): %s%s ended after %.0f seconds",
                *(who, self._pid, call.what, where, seconds),
            )
        fields: dict[str, Any] = {
            "worker": self._worker,
            "pid": self._pid,
            "call": call.what,
            "path": call.path,
            "seconds": round(seconds, 1),
            **({"name": self._name} if self._name else {}),
        }
        if kind == "stuck":
            fields["process_state"] = state
        self._report(kind, fields)


class WorkerPulse:
    """What is known of the calls of a worker process, from its beats and from outside."""

    def __init__(self, number: int, pid: int, after: float, report: Report, name: str = "") -> None:
        self._pid = pid
        self._after = after
        self._calls: tuple[Ongoing, ...] = ()
        self._freeze = FreezeWatch(pid)
        self._frozen = 0.0
        self._heard = time.monotonic()
        self._stuck = StuckCalls(number, pid, after, report, name)

    @property
    def stuck_seconds(self) -> float:
        """How long its oldest reported call has lasted; 0 where it is not stuck."""
        return self._stuck.seconds

    def heard(self) -> None:
        """It gave a sign of life."""
        self._heard = time.monotonic()

    def calls(self, calls: tuple[Ongoing, ...]) -> None:
        """These have not returned for a while, it says; it has no others of the kind."""
        self._calls = calls
        self._look()

    def sample(self) -> None:
        """Look from outside, about once a second."""
        self._frozen = self._freeze.seconds()
        self._look()

    def clear(self) -> None:
        """The process is gone."""
        self._stuck.clear()

    def _look(self) -> None:
        """Its own words count while it speaks; then its silence; a freeze is seen from outside."""
        silence = time.monotonic() - self._heard
        calls = list(self._calls)
        if silence >= self._after:
            # What it said last is the best guess at what it hangs in.
            last = calls[0] if calls else Ongoing(0, UNKNOWN, "", 0.0)
            calls = [Ongoing(last.thread_id, last.what, last.path, silence + last.seconds)]
        else:
            calls = _with_freeze(calls, self._pid, self._frozen)
        self._stuck.look(calls)


class OwnWatch:
    """Looks after this process's own calls from a thread, whatever the others hang in."""

    def __init__(self, watch: IoWatch, after: float, report: Report) -> None:
        self._watch = watch
        self._after = after
        self._freeze = FreezeWatch(os.getpid())
        self._stuck = StuckCalls(None, os.getpid(), after, report)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-io-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_JOIN)
        if not self._thread.is_alive():
            self._stuck.clear()

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self._after / 4)):
            calls = _with_freeze(self._watch.ongoing(), os.getpid(), self._freeze.seconds())
            # The words on stderr are out before; who takes the event may be stuck as well.
            with suppress(Exception):
                self._stuck.look(calls)


def _with_freeze(calls: Sequence[Ongoing], pid: int, frozen: float) -> list[Ongoing]:
    """The calls, where the main thread has been frozen for so many seconds; 0 is not.

    What the kernel holds does not get on, so the time that a long call is given does not count.
    """
    known = next((call for call in calls if call.thread_id == pid), None)
    if not frozen or (known is not None and not known.slack):
        return list(calls)
    held = known or Ongoing(pid, UNKNOWN, "", 0.0)
    others = [call for call in calls if call is not known]
    return [*others, replace(held, seconds=frozen, slack=0.0)]


def _key(call: Ongoing) -> _Key:
    return (call.thread_id, call.what, call.path)
