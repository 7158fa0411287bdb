"""Whether one file system has room for one more unit, in words where it has not."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.amounts import size_text
from paceline.durable.space import Space, SpaceWatch, read_space, who_uses

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


@dataclass
class _Refusal:
    """What a write met that found no room."""

    reason: str
    pause: float
    again_at: float


class Room:
    """The room for units on the file system of `path`, whoever else writes there.

    Above the mark `high` nothing is let in until `low` is reached; marks of 1 leave it to the free
    bytes. With `keeps_spare`, `Space.spare` of these is nobody's.
    """

    def __init__(
        self,
        path: Path,
        high: float = 1.0,
        low: float = 1.0,
        *,
        keeps_spare: bool = False,
        read: Callable[[Path], Space] = read_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = SpaceWatch(path, high, low, read=read)
        self._keeps_spare = keeps_spare
        self._clock = clock
        self._refusal: _Refusal | None = None
        self._least_free: Space | None = None
        self._largest = 0

    @property
    def path(self) -> Path:
        """What is watched."""
        return self._watch.path

    @property
    def was_refused(self) -> bool:
        """Whether the last write found no room."""
        return self._refusal is not None

    def why_not(self, need: int, in_work: int, *, is_drained: bool = False) -> str | None:
        """Why a unit of up to `need` bytes must wait; None where it need not.

        `in_work` are bytes that were let in and are not written yet: the file system does not
        know of them. See `SpaceWatch.check` for `is_drained`.
        """
        self._largest = max(self._largest, need)
        may_go_on = self._watch.check(is_drained=is_drained)
        space = self._watch.space
        spare = space.spare if self._keeps_spare else 0
        if space.free < need + in_work + spare:
            others = f" beside {size_text(in_work)} of those in work" if in_work else ""
            others += f", and {size_text(spare)} stay free" if spare else ""
            met = f"{self._refusal.reason}. " if self._refusal else ""
            return (
                f"{met}{self._watch.describe()}: the next shard may take {size_text(need)}{others}"
            )
        if not may_go_on:
            if self._least_free is None or space.free < self._least_free.free:
                self._least_free = space
            return (
                f"{self._watch.describe()}: it is above {_percent(self._watch.high)}, and "
                f"the work goes on at {_percent(self._watch.low)}"
            )
        # A quota, or a limit that statvfs does not show: one at a time finds out.
        if self._refusal and (in_work or self._clock() < self._refusal.again_at):
            return self._refusal.reason
        return None

    def refused(self, error: OSError) -> None:
        """A write found no room: one more is let in after a pause, which grows."""
        before = self._refusal
        pause = min(_LONGEST_PAUSE, before.pause * 2) if before else _FIRST_PAUSE
        place = error.filename2 or error.filename or self.path
        reason = f"{place}: {error.strerror}"
        self._refusal = _Refusal(reason, pause, self._clock() + pause)

    def took(self) -> None:
        """A write found room."""
        self._refusal = None

    def better_mark(self) -> float | None:
        """A high mark that would have waited less and still left room; None where none would."""
        space = self._least_free
        if space is None:
            return None
        mark = math.ceil(100 * space.share + 1) / 100
        left = (1 - mark) * (space.used + space.free)
        return mark if mark < 1 and left >= 4 * self._largest else None


class Users:
    """Whose bytes fill a file system; counted in a thread, since that may take seconds."""

    def __init__(self, path: Path, *, every: float = 60.0) -> None:
        self._path = path
        self._every = every
        self._words = ""
        self._asked_at: float | None = None

    def words(self) -> str:
        """Such as `largest there: /dev/shm/x of alice (3.0 GB), ...`; empty until it is known."""
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at > self._every:
            self._asked_at = now
            threading.Thread(target=self._count, name="paceline-space", daemon=True).start()
        return self._words

    def _count(self) -> None:
        try:
            found = [(name, size) for name, size in who_uses(self._path) if size]
        except OSError:
            return
        if found:
            self._words = "largest there: " + ", ".join(
                f"{name} ({size_text(s)})" for name, s in found
            )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
