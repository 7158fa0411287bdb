"""SIGTERM and SIGINT: a loop notes them and ends at a good place; elsewhere they are exceptions."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.durable.errors import Interrupted

_LOG = logging.getLogger(__name__)

_BOTH = (signal.SIGTERM, signal.SIGINT)
_ECHO = 0.5
"""Seconds in which a second signal is the first one's echo: timeout(1) and others signal a process
and then its group as well."""


class Terminated(KeyboardInterrupt):
    """SIGTERM outside a loop that notes it.

    Not an Exception: libraries swallow those in places, and the signal would be lost.
    """


class Stop:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0

    @property
    def asked(self) -> bool:
        """True from the first signal on."""
        return self._number != 0

    @property
    def seconds(self) -> float:
        """Since the first signal; 0 before."""
        return time.monotonic() - self._at if self.asked else 0.0

    @property
    def name(self) -> str:
        """Of the first signal, such as `SIGTERM`; empty before."""
        return signal.Signals(self._number).name if self._number else ""

    def interrupted(self, what: str) -> Interrupted:
        """The error to raise; `what` says where the work stands, such as `stopped after step 7`."""
        return Interrupted(f"{self.name}: {what}. The same command goes on from there.")

    def note(self, number: int) -> bool:
        """Take a signal; True for the first. Raises KeyboardInterrupt for one after its echo."""
        now = time.monotonic()
        if not self.asked:
            self._number, self._at = number, now
            return True
        if now - self._at > _ECHO:
            raise KeyboardInterrupt(signal.Signals(number).name)
        return False


@contextmanager
def signals_noted(last: str) -> Iterator[Stop]:
    """Note the first SIGTERM or SIGINT instead of acting on it; the body looks at `asked`.

    `last` names what is finished before the end, such as `this step`, for the log. Another signal
    raises KeyboardInterrupt at once. A signal that comes too late for the body to see is passed
    on to the handler from before. Does nothing in other threads than the main one, which alone
    may handle signals, and leaves a signal alone that this process was started to ignore.
    """
    stop = Stop()

    def note(number: int, _frame: FrameType | None) -> None:
        if stop.note(number):
            _LOG.warning("%s: stopping after %s; once more stops at once", stop.name, last)

    with _handled_by(note, _BOTH):
        yield stop
    if stop.asked:
        signal.raise_signal(signal.Signals[stop.name])


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise in the main thread, so that `with` blocks clean up; Interrupted outside.

    In other threads than the main one this does nothing.
    """
    stop = Stop()

    def end(number: int, _frame: FrameType | None) -> None:
        if stop.note(number):
            raise Terminated(stop.name)

    try:
        with _handled_by(end, (signal.SIGTERM,)):
            yield
    except Terminated:
        raise stop.interrupted("stopped. What was complete stands") from None


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Let SIGTERM and SIGINT wait, here and in processes that are started in the meantime.

    A child is born with the mask: no signal to the group hits it before `ignore_signals`. The mask
    is this thread's alone, and another thread may take a signal to the process: it is noted.
    """
    held: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BOTH)
    try:
        with _handled_by(lambda number, _frame: held.append(number), _BOTH):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)


def ignore_signals() -> None:
    """For a worker: when to end is its parent's decision, whoever signals the whole group."""
    for number in _BOTH:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BOTH)


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: tuple[signal.Signals, ...]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    # None is a handler that is not Python's, which could not be put back.
    mine = [n for n in numbers if before[n] not in (signal.SIG_IGN, None)]
    try:
        for number in mine:
            signal.signal(number, handler)
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])
