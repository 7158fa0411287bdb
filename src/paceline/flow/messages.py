"""What a worker process and its parent say to each other."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from paceline.durable.errors import PacelineError, WorkerFailed, no_room, storage_refused
from paceline.durable.iowatch import Ongoing


@dataclass(frozen=True)
class Hello:
    """The process runs; it wants the setup and its payload."""

    code: str
    """Its `source_hash()`; empty where nobody asks for it."""


@dataclass(frozen=True)
class Ready:
    """The setup is done; it wants its first unit or item."""


@dataclass(frozen=True)
class Told:
    """What it does now."""

    state: str


@dataclass(frozen=True)
class Beat:
    """It is alive, and these calls have not returned for a while."""

    calls: tuple[Ongoing, ...]


@dataclass(frozen=True)
class Finished:
    """The unit in work is made."""

    made: bytes
    """A pickled `Made`."""


@dataclass(frozen=True)
class Refused:
    """The disk had no room for the unit in work; the worker is sound."""

    error: OSError


@dataclass(frozen=True)
class Failed:
    """The unit in work cannot be made, for a reason that leaves the worker sound."""

    summary: str
    error: bytes | None = None
    """The exception, pickled."""


@dataclass(frozen=True)
class Raised:
    """The process ends itself: in which state it is, nobody knows."""

    doing: str
    summary: str
    trace: str
    error: bytes | None
    """The exception, pickled, where it is one of Paceline's."""


def failure_of_unit(error: Exception) -> Refused | Failed | None:
    """What an exception over a unit means; None where it leaves the process unsound.

    An error that is raised on purpose says what is wrong with the unit or the disk; after any
    other (a device's, out of memory) nobody knows what the process still can do.
    """
    full = no_room(error)
    if full is not None:
        return Refused(OSError(full.errno, full.strerror, full.filename, None, full.filename2))
    ours = error if isinstance(error, PacelineError) else None
    if isinstance(error, OSError):
        ours = storage_refused(error)
    return None if ours is None else Failed(summary_of(ours), _pickled(ours))


def raised(error: BaseException, doing: str) -> Raised:
    """The message of a process that an exception ends."""
    ours: PacelineError | None = error if isinstance(error, PacelineError) else None
    if isinstance(error, OSError):
        ours = storage_refused(error)
    trace = "".join(traceback.format_exception(error))
    return Raised(doing, summary_of(error), trace, None if ours is None else _pickled(ours))


def summary_of(error: BaseException) -> str:
    """Type and message, in one line or a few."""
    if isinstance(error, PacelineError):
        # Where the class of an error of our own lies, tells nobody anything.
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception_only(error)).strip()


def sendable(value: Any, name: str) -> bytes:
    """A value as it travels. Raises WorkerFailed, with `name`, where it cannot be pickled."""
    try:
        return packed(value)
    except Exception as error:
        raise WorkerFailed(f"{name} cannot be sent to a worker: {summary_of(error)}") from error


def _pickled(error: BaseException) -> bytes | None:
    """None where it does not survive the way."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001
        return None
    return data


def packed(message: Any) -> bytes:
    """As it travels."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
