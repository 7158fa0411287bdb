"""One tracker in a thread of its own: whatever it does, nobody waits for it and nothing is raised.

A call that hangs holds up its own tracker alone. What does not fit into the queue goes from its
old end, since the newest points are the ones that are looked at.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.masking import masked_text
from paceline.trackers.tracker import RunIdentity, Tracker

_LOG = logging.getLogger(__name__)

QUEUE = 2000
"""Calls that wait, at most."""
RETRY = 60.0
"""Seconds between two attempts to open a run."""

_LONGEST = 300


class Lane:
    """Hands calls to a tracker, in order."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: RunIdentity,
        config: dict[str, Any],
        *,
        queue: int = QUEUE,
        retry: float = RETRY,
    ) -> None:
        """Start the thread; `name` is that of the tracker, and of its extra."""
        self.name = name
        self._tracker, self._run, self._config = tracker, run, config
        self._limit, self._retry = queue, retry
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._outcome: str | None = None
        self._is_given_up = False
        self._lost = 0
        self._told: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Have points told some time; returns at once."""
        self._put(lambda: self._tracker.log(step, metrics))

    def note(self, step: int, text: str) -> None:
        """Have a sentence told some time; returns at once."""
        self._put(lambda: self._tracker.note(step, text))

    def end(self, outcome: str) -> None:
        """Have the run closed once all is told; returns at once."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait for that, at most so many seconds; warn of what may be missing."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            _LOG.warning(
                "tracker %s: still at work as the training ends, so its last points may not be "
                "there; the events of the run have them all", self.name,
            )  # fmt: skip
        elif self._lost:
            _LOG.warning(
                "tracker %s: %d calls did not reach it, so its curves have gaps; the events of the "
                "run have all", self.name, self._lost,
            )  # fmt: skip

    def _put(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._is_given_up:
                return
            is_full = len(self._calls) >= self._limit
            if is_full:
                self._calls.popleft()
                self._lost += 1
            self._calls.append(call)
            self._changed.notify()
        if is_full:
            self._warn("queue", "full", "it does not keep up; the oldest points are left out")

    def _work(self) -> None:
        if not self._started():
            with self._changed:
                self._is_given_up = True
                # That it is missing has been said.
                self._lost += 0 if ("start", "missing") in self._told else len(self._calls)
                self._calls.clear()
            return
        while (call := self._next()) is not None:
            if not self._tried("log", call):
                with self._changed:
                    self._lost += 1
        outcome = self._outcome or "failed"
        self._tried("finish", lambda: self._tracker.finish(outcome))

    def _started(self) -> bool:
        """Open the run, trying again until it is opened or the training has ended."""
        while True:
            try:
                self._tracker.start(self._run, self._config)
                return True
            except ModuleNotFoundError as error:
                if (error.name or "").lower().startswith(self.name):
                    how = f"Run `pip install 'paceline[{self.name}]'`"
                    self._warn(
                        "start", "missing", f"not installed, so nothing is sent there. {how}"
                    )
                    return False
                self._warn_of("start", error)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._warn_of("start", error)
            until = time.monotonic() + self._retry
            with self._changed:
                while self._outcome is None and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._outcome is not None:
                    return False

    def _next(self) -> Callable[[], None] | None:
        """The next call, waited for; None once there will be no more."""
        with self._changed:
            while not self._calls and self._outcome is None:
                self._changed.wait()
            return self._calls.popleft() if self._calls else None

    def _tried(self, what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        # A library that ends its thread must not end our telling of it.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._warn_of(what, error)
            return False
        return True

    def _warn_of(self, what: str, error: BaseException) -> None:
        kind = type(error).__name__
        lines = str(error).strip().splitlines() or ["without a word"]
        self._warn(what, kind, f"{what} failed ({kind}: {masked_text(lines[0])[:_LONGEST]})")

    def _warn(self, what: str, kind: str, text: str) -> None:
        """Once for each kind of failure."""
        with self._changed:
            if (what, kind) in self._told:
                return
            self._told.add((what, kind))
        _LOG.warning("tracker %s: %s. The training goes on.", self.name, text.rstrip("."))
