"""Waits for room: since when, for how long in all, and what would shorten them."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.durable.amounts import span_text

Kind = Literal["budget", "space", "store", "journal"]

_REMEDIES = {
    "budget": "No upload ended in this time: look at the network and at the store",
    "space": "Make room there",
    "journal": "Make room on that disk",
}
"""What to do about a wait that ends the work; errors of a store say it themselves."""


@dataclass(frozen=True)
class Wait:
    """Why no unit is let in now."""

    reason: str
    """For people; begins with the place."""

    kind: Kind
    """`budget`: staging holds what it may; `space`: the file system; `store`: it does not take
    what is staged; `journal`: it cannot be written."""

    since: float
    """Seconds since the epoch."""


class Stalls:
    """The wait that lasts, if any, and the seconds of all by kind."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._wait: Wait | None = None
        self._is_idle = False
        self._idle = 0.0
        self._counted = 0.0
        self._began = 0.0
        self._progress = clock()

    @property
    def waiting(self) -> Wait | None:
        """The wait that lasts."""
        return self._wait

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds waited by kind, the wait that lasts included."""
        self._count()
        return dict(self._seconds)

    @property
    def last_progress(self) -> float:
        """When something was last verified, or the beginning; by the clock."""
        return self._progress

    @property
    def idle_seconds(self) -> float:
        """Seconds of all waits that were called idle."""
        self._count()
        return self._idle

    def wait(self, kind: Kind, reason: str, *, is_idle: bool = False) -> Wait:
        """Begin to wait, or go on; idle where what is waited for could do more at a time."""
        self._count()
        self._is_idle = is_idle
        now = self._clock()
        if self._wait is None:
            self._began = now
        same = self._wait is not None and self._wait.kind == kind
        since = self._wait.since if same and self._wait else time.time()
        self._wait = Wait(reason, kind, since)
        self._counted = now
        return self._wait

    def over(self) -> None:
        """The wait has ended, if there was one."""
        self._count()
        self._wait = None

    def progress(self) -> None:
        """Something was verified: whatever is waited for, it is not stuck."""
        self._progress = self._clock()

    def lasted(self) -> float:
        """Seconds since the wait began, whatever kinds it had, or since the last progress in it."""
        if self._wait is None:
            return 0.0
        return self._clock() - max(self._began, self._progress)

    def given_up(self) -> str:
        """Why the wait that lasts is the end, and what to do; without one, nothing."""
        if self._wait is None:
            return ""
        kind, reason = self._wait.kind, self._wait.reason
        # By these words the next start knows a full disk.
        full = os.strerror(errno.ENOSPC)
        if kind in ("space", "journal") and full not in reason:
            reason = f"{full} for {span_text(self.lasted())}: {reason}"
        # A whole sentence has said it.
        if reason.endswith("."):
            return reason
        remedy = f" {_REMEDIES[kind]}." if kind in _REMEDIES else ""
        return (
            f"{reason}. Given up after {span_text(self.lasted())}.{remedy} Nothing is lost that "
            "was complete: the same command goes on from there."
        )

    def _count(self) -> None:
        if self._wait is not None:
            now = self._clock()
            kind = self._wait.kind
            self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._counted
            self._idle += now - self._counted if self._is_idle else 0.0
            self._counted = now


def budget_advice(stalled: float, seconds: float, idle: float, uploads: int) -> str:
    """What staging that was full for `stalled` of `seconds` asks for.

    `idle` are the seconds of these in which fewer than `uploads` uploads were under way: only
    then more staging would have helped.
    """
    full = f"staging was full for {span_text(stalled)} of {span_text(seconds)}"
    if idle > stalled / 2:
        return (
            f"{full}, with fewer than {uploads} uploads under way: a larger "
            "`extract.staging_bytes` or a smaller `extract.shard_bytes` would help"
        )
    return (
        f"{full}: the upload is the bottleneck; a larger `extract.staging_bytes` would not help, "
        "more `extract.uploads` or `extract.codec: planes` would"
    )


def space_advice(path: object, stalled: float, seconds: float, better: float | None) -> str:
    """What a file system without room for `stalled` of `seconds` asks for."""
    full = f"{path} had no room for {span_text(stalled)} of {span_text(seconds)}"
    if better is None:
        return f"{full}: make room there"
    return f"{full}, though bytes were free: `extract.high_mark: {better:.2f}` would do"


def other_advice(kind: str, stalled: float, seconds: float) -> str:
    """What waits for the store, or for the journal's disk, ask for."""
    what = "the store did not take uploads" if kind == "store" else "the journal's disk was full"
    return f"{what} for {span_text(stalled)} of {span_text(seconds)}"
