"""Looking at files that may not answer: a frozen mount holds whoever reads it, signals or not."""

import contextlib
import fcntl
import gc
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from paceline.durable.errors import PacelineError

T = TypeVar("T")

_BLOCK = 1 << 16
_GRACE = 0.5
"""Seconds in which a child that has told, or was killed, is gone."""


class NoAnswer(PacelineError):
    """A look at files has not come back in time."""


def answered(look: Callable[[], T], what: str, *, seconds: float = 10.0) -> T:
    """What `look` returns or raises, found out by a child process that may be left behind.

    The child alone touches the files: where a mount is frozen it stays in the kernel, and this
    process goes on. Raises NoAnswer, which names `what` and the child's state, after `seconds`.
    """
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # Of forks beside threads. The child reads files, and leaves without what they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _answer(look, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        data = _read_all(pipe, seconds)
    if data is None:
        state = _state(child)
        os.kill(child, signal.SIGKILL)
        _bury(child)
        raise NoAnswer(
            f"{what} does not answer: a read there has not come back for {seconds:.0f} s{state}. "
            "A mount that is frozen does this; nothing here was changed. See that it comes back "
            "(`dmesg`, the storage server), then ask again."
        )
    _bury(child)
    kind, value = (
        pickle.loads(data) if data else ("error", NoAnswer(f"{what}: the look at it died"))
    )
    if kind == "error":
        raise value
    return cast("T", value)


def _answer(look: Callable[[], T], pipe: int) -> None:
    """In the child: look, tell, and leave without the parent's clean-up."""
    try:
        pipe = _alone_with(pipe)
        try:
            told = pickle.dumps(("value", look()))
        except Exception as error:  # noqa: BLE001 - it is raised again in the parent
            told = pickle.dumps(("error", error))
        with os.fdopen(pipe, "wb") as out:
            out.write(told)
    finally:
        os._exit(0)


def _alone_with(pipe: int) -> int:
    """Close all that the parent has open but `pipe`; its new number.

    Who is left behind would hold it for good: a lock, and the pipe of whoever waits for all that
    this command prints.
    """
    # A file object that is collected late would close what has its number by then.
    gc.disable()
    pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD, 3)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    for number in map(int, os.listdir("/dev/fd")):  # noqa: PTH208 - they are no paths
        if number > 2 and number != pipe:
            with contextlib.suppress(OSError):
                os.close(number)
    return pipe


def _read_all(pipe: BinaryIO, seconds: float) -> bytes | None:
    """All that comes; None where it has not ended in time."""
    deadline = time.monotonic() + seconds
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        block = pipe.read(_BLOCK)
        if not block:
            return data
        data += block


def _bury(child: int) -> None:
    """Reap a child, unless the kernel holds it: a thread of it may wait for a frozen mount."""
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return f" (process state {state})"
