"""Progress in tokens: a live bar on a terminal, a plain line every few seconds elsewhere."""

import logging
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_LOG = logging.getLogger(__name__)
_LINE_EVERY = 15.0
"""Seconds between two plain lines."""


def seconds_text(seconds: float) -> str:
    """`1:02:03` or `02:03`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


@dataclass(frozen=True)
class Speed:
    """What a stage that measures it itself has found."""

    rate: float | None
    """Tokens per second; None before anything was measured."""
    eta: float | None
    """Seconds left; None where unknown."""


class TokenProgress:
    """Shows done and all tokens, tokens per second and the time left, measured in tokens."""

    def __init__(self, title: str, total: int, *, done: int = 0) -> None:
        self._title, self._total, self._done = title, max(total, 1), done
        self._last_line = time.monotonic()
        # Moments and what was done by then: where the rate counts from, and the first update.
        self._start = (self._last_line, done)
        self._first: tuple[float, int] | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=self._total, completed=done, note="")

    @property
    def total(self) -> int:
        """Tokens in all, at least 1."""
        return self._total

    @property
    def rate(self) -> float:
        """Tokens per second since the first update, as what comes before may be a start-up.

        At that one they are counted from the start.
        """
        begin, done = self._start
        return (self._done - done) / max(time.monotonic() - begin, 1e-9)

    @property
    def eta(self) -> float:
        """Seconds left at that rate; 0 before there is one."""
        return (self._total - self._done) / self.rate if self.rate > 0 else 0.0

    def update(self, done: int, note: str = "", *, speed: Speed | None = None) -> None:
        """Tell how many tokens are done; `note` stands beside the rate.

        Without a `speed` it is `rate`.
        """
        if self._first is not None and done > self._first[1]:
            self._start = self._first
        elif self._first is None and done > self._start[1]:
            self._first = (time.monotonic(), done)
        self._done = done
        if speed is None:
            speed = Speed(self.rate or None, self.eta if self.rate else None)
        words = [f"{speed.rate:,.0f} tokens/s"] if speed.rate else []
        if speed.eta is not None:
            words.append(f"{seconds_text(speed.eta)} left")
        words += [note] if note else []
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=", ".join(words))
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            _LOG.info(
                "%s: %s of %s tokens (%.0f %%)%s",
                self._title,
                f"{done:,}",
                f"{self._total:,}",
                100 * done / self._total,
                "".join(f", {word}" for word in words),
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
