"""One owner per folder: two processes that write one run would undo each other's work."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.durable.errors import UserError
from paceline.durable.fs import REAL_FS, FileSystem

LOCK = "owner.lock"

_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)

_TRIES = 10
_PAUSE = 0.02
"""Seconds between tries: who only looks whether a folder is held has the lock for a moment."""


@dataclass(frozen=True)
class Owner:
    """Who holds a folder; what the lock file says."""

    pid: int
    host: str
    since: float
    """Seconds since the epoch."""
    doing: str
    """The command, for people."""


@contextmanager
def owned(folder: Path, doing: str, *, fs: FileSystem = REAL_FS) -> Iterator[Owner | None]:
    """Hold `folder`, made where it is missing, against every other process.

    Yields the owner that died without letting go, if there was one: the lock is the operating
    system's, so it ends with its process and needs no clean-up; the file only says whose it is. In
    a folder that cannot be written there is nothing to guard, and nothing is locked.

    Raises UserError, naming process, host and age, where another process holds it.
    """
    fs.make_dirs(folder)
    path = folder / LOCK
    try:
        file = fs.open_append(path)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        yield None
        return
    with file:
        if not _patiently(lambda: fs.lock(file)):
            raise UserError(_refusal(folder, _read(path)))
        before = _read(path)
        owner = Owner(os.getpid(), socket.gethostname(), round(time.time(), 3), doing)
        # Appended to an emptied file: the lock belongs to this very file, so none may replace it.
        # Only words: on a full disk the lock holds without them.
        with suppress(OSError):
            fs.truncate(path, 0)
            fs.write(file, msgspec.json.encode(owner))
        try:
            yield before
        finally:
            with suppress(OSError):
                fs.truncate(path, 0)


def holder(folder: Path, *, fs: FileSystem = REAL_FS) -> Owner | None:
    """Who holds `folder` at this moment; None where nobody does, or there is no lock file.

    Looks without disturbing: whoever wants the folder meanwhile gets it. Raises UserError where
    it is held and the lock file does not say by whom (a full disk keeps the words out).
    """
    path = folder / LOCK
    found: list[Owner | None] = []

    def look() -> bool:
        """True once it is clear: not held, or held with words."""
        try:
            with path.open("rb") as file:
                if fs.lock(file, shared=True):
                    found.append(None)
                    return True
                owner = _read(path)
        except FileNotFoundError:
            found.append(None)
            return True
        if owner is not None:
            found.append(owner)
        return owner is not None

    # Between taking the lock and writing the words there is a moment.
    if not _patiently(look):
        raise UserError(_refusal(folder, None))
    return found[0]


def _patiently(attempt: Callable[[], bool]) -> bool:
    for _ in range(_TRIES):
        if attempt():
            return True
        time.sleep(_PAUSE)
    return False


def read_owner(folder: Path) -> Owner | None:
    """Who holds `folder`, or held it when it died; None where the last one let go.

    Asks for no lock, which could keep an owner out that comes at this moment.
    """
    return _read(folder / LOCK)


def _read(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def _refusal(folder: Path, owner: Owner | None) -> str:
    ways = "Wait for it to end, stop it, or use another run directory (`--run DIR`)."
    if owner is None:
        return f"{folder}: another process is at work in this run directory. {ways}"
    age = max(0.0, time.time() - owner.since)
    return (
        f"{folder}: `{owner.doing}` is at work in this run directory: process {owner.pid} on "
        f"{owner.host}, for {_age(age)} now. {ways}"
    )


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
