"""Every error that Paceline raises on purpose.

::

    PacelineError                 exit code 1
    ├── UserError                 exit code 2: what was asked for cannot be done as asked
    │   ├── RecipeError           a key, a value or a combination in the recipe
    │   ├── RecipeChanged         artefacts of another recipe stand in the run directory
    │   ├── DataError             the input data: names file, row and reason
    │   └── TargetError           the target model: kind, files, tokenizer
    ├── Interrupted               exit code 130: stopped by a signal, in a state to go on from
    ├── TrainingDiverged          too many non-finite steps in a row
    ├── NotLossless               speculative output is not the target's own
    ├── OutOfMemory               a training has filled a device or the machine
    ├── WorkerFailed              a worker process raised, died, or answered with nonsense
    ├── ChannelFailed             a part behind the other end of a channel has failed
    ├── ChannelClosed             something was put into a channel after its end
    ├── StorageRefused            the file system said no: no room, no permission, a fault
    ├── StoreFailed               an object store said no, or did not answer
    ├── ServersFailed             none of the servers that run the target answers
    └── IntegrityError            bytes at rest are not what was written
        ├── JournalDamaged        a bad record that is followed by good ones
        └── ShardDamaged          a shard or checkpoint whose checksum does not hold
"""

import errno
import os
from typing import Literal


class PacelineError(Exception):
    """Base of all; the message says what happened, where, and what to do."""

    exit_code = 1


class UserError(PacelineError):
    """What was asked for cannot be done as asked."""

    exit_code = 2


class RecipeError(UserError):
    """A key, a value or a combination in the recipe is impossible."""


class RecipeChanged(UserError):
    """The run directory holds artefacts that another recipe made."""


class DataError(UserError):
    """Input data that cannot be used; names the file and the row."""


class TargetError(UserError):
    """A target that cannot be loaded or is of a kind that is not supported."""


class Interrupted(PacelineError):
    """Stopped by a signal, in a state that the same command goes on from."""

    exit_code = 130


class TrainingDiverged(PacelineError):
    """Too many non-finite steps in a row."""


class NotLossless(PacelineError):
    """Speculative output is not what the target says by itself."""


class OutOfMemory(PacelineError):
    """A training has filled a device or the machine; names it, and what ran then."""

    def __init__(self, message: str, is_sound: bool = True) -> None:
        super().__init__(message)
        # Not in `args`: what is not there travels with a pickled error by its own name.
        self.is_sound = is_sound
        """Whether what failed has changed nothing, so that a checkpoint can still be written."""


class WorkerFailed(PacelineError):
    """A worker process raised, was killed, or gave a result that cannot be sent."""


class ChannelFailed(PacelineError):
    """A part at the other end of a channel has failed; the cause is chained."""


class ChannelClosed(PacelineError):
    """Something was put into a channel that had been closed."""


class StorageRefused(PacelineError):
    """The file system said no; what was complete before stands as it was."""

    def __init__(self, message: str, errno: int | None = None, path: str = "") -> None:
        super().__init__(message)
        # Not in `args`: what is not there travels with a pickled error by its own name.
        self.errno = errno
        """What the operating system called it; None where it was not the system that refused."""
        self.path = path
        """Where; empty where that is not known."""


class StoreFailed(PacelineError):
    """An object store refused an operation, or did not answer; names url, key and operation."""

    def __init__(
        self,
        message: str,
        transient: bool,
        *,
        advice: str = "",
        kind: Literal["", "denied", "unreached"] = "",
    ) -> None:
        # Both in `args`, from which an error is pickled on its way out of a worker.
        super().__init__(message, transient)
        self.transient = transient
        """Whether the same call may succeed later without anybody's doing."""
        self.advice = advice
        """The end of the message that says what to do, where it says so."""
        self.kind: Literal["", "denied", "unreached"] = kind
        """`denied`: the store knows who asks, and does not let them; `unreached`: it was never
        asked."""

    def __str__(self) -> str:
        return self.args[0]


class ServersFailed(PacelineError):
    """None of the servers that run the target answers; says what each said last."""


class IntegrityError(PacelineError):
    """Bytes at rest are not the bytes that were written."""


class JournalDamaged(IntegrityError):
    """A journal has a bad record followed by good ones: not a torn tail."""


class ShardDamaged(IntegrityError):
    """A shard or checkpoint does not hold what its checksum promises."""


def storage_refused(
    error: OSError, *, setting: str = "", goes_on: bool = True
) -> StorageRefused | None:
    """The refusal that an OSError stands for, in words; None for what no disk is to blame for.

    `setting` is what named the place, such as `--run DIR`; `goes_on` whether the same command,
    given again, goes on with what is there.
    """
    advice = _ADVICE.get(error.errno or 0)
    if advice is None:
        return None
    if advice in (_ROOM, _RIGHTS) and setting:
        advice = f"{advice.rstrip('.')} (`{setting}`)."
    name = path_of(error)
    place = f"{name}: " if name else ""
    end = " Nothing is lost that was complete: the same command goes on from there."
    return StorageRefused(
        f"{place}{error.strerror or os.strerror(error.errno or 0)}. {advice}{end * goes_on}",
        error.errno,
        name,
    )


def path_of(error: OSError) -> str:
    """Where it happened; empty where the error does not say."""
    # Of a rename the target is what a reader knows; the other name is temporary.
    name = error.filename2 or error.filename
    return "" if name is None or isinstance(name, int) else os.fsdecode(name)


def no_room(error: BaseException) -> OSError | None:
    """The full disk or quota that is behind an error; None where it is something else.

    Of all that goes wrong with a disk this alone passes by itself, when there is room.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | StorageRefused):
            number = cause.errno
            if number in (errno.ENOSPC, errno.EDQUOT):
                return cause if isinstance(cause, OSError) else OSError(number, str(cause))
        cause = cause.__cause__
    return None


_ROOM = "Make room there, or choose another place."
_RIGHTS = "Give this user the right to it, or choose another place."
_FAULT = "Look at the disk or the mount."
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "Raise the limit on the size of a file (`ulimit -f`).",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.EIO: _FAULT,
    errno.ESTALE: _FAULT,
    errno.ENODEV: _FAULT,
    errno.ENXIO: _FAULT,
    errno.ETIMEDOUT: _FAULT,
    # What a mount says once the process or the server behind it is gone.
    errno.ENOTCONN: _FAULT,
    errno.ECONNABORTED: _FAULT,
    errno.EHOSTDOWN: _FAULT,
    errno.EREMOTEIO: _FAULT,
    errno.EEXIST: "A file stands where a folder is needed: move it away.",
    errno.ENOTDIR: "A file stands where a folder is needed: move it away.",
    errno.EISDIR: "A folder stands where a file is needed: move it away.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.ELOOP: "A link there leads back to itself.",
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`).",
    errno.ENFILE: "Too many files are open on this machine.",
}
