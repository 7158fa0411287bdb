"""Units of work: what is handed to workers, what they give back, and what is told meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.durable.depot import DepotMeters
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.store import Stat


@dataclass(frozen=True)
class Task:
    """One unit that is to be made."""

    index: int
    key: str
    """Its name in the store; unique among the tasks of a call."""
    num_bytes: int
    """The most that it may take; reserved before it is handed out."""
    tokens: int
    payload: Any
    """What the worker needs to know beyond that; can be pickled."""

    def __repr__(self) -> str:
        return f"{self.key} ({self.tokens:,} tokens)"


@dataclass(frozen=True)
class Made:
    """A unit that its worker has written, durably, where it was told to."""

    stat: Stat
    info: Any = None
    """What the worker has to say of it beyond that; can be pickled."""


Handler = Callable[[Task, Path], Made]
"""Writes a unit at the path, whole and durable, or raises."""

STARTING = "starting"
LOADING = "loading"
IDLE = "idle"
CAPTURING = "capturing"
WAITING = "waiting for upload"
DRAINING = "draining"
RESTARTING = "restarting"
GAVE_UP = "gave up"


class WorkerContext:
    """What a worker may use and tell; its setup gets it."""

    def __init__(self, number: int, watch: IoWatch, tell: Callable[[str], None]) -> None:
        self.number = number
        """From 0."""
        self.watch = watch
        """Calls made inside `watch.call(...)` are reported when they do not return."""
        self.fs: FileSystem = WatchedFs(REAL_FS, watch)
        """The real file system, watched."""
        self._tell = tell
        self._state = LOADING

    def state(self, name: str) -> None:
        """Say what the worker does: `loading`, `warming`, `capturing`."""
        if name != self._state:
            self._state = name
            self._tell(name)


Setup = Callable[[Any, WorkerContext], Handler]
"""A module's top-level function, called once in each worker as `setup(payload, context)`."""


@dataclass(frozen=True)
class Policy:
    """How units are made."""

    workers: int = 1
    """Processes, where `devices` is empty."""
    threads: int = 1
    """CPU threads of each."""
    devices: tuple[int, ...] = ()
    """One process for each of these GPUs; it sees that one alone, as its first."""
    isolate: bool = True
    """Off runs everything in this process; nothing is then restarted."""
    unit_retries: int = 2
    """Failures or deaths over one unit after which it is quarantined."""
    restarts: int = 5
    """Of each worker, within `restart_window`; at the next death it gives up."""
    restart_window: float = 600.0
    """Seconds."""
    backoff: float = 1.0
    """Seconds before the first restart; doubled with each one that brings no unit, up to 60."""
    stuck_after: float = 30.0
    """Seconds after which a call that has not returned, or a silent worker, is reported."""
    kill_after: float = 300.0
    """Seconds after which a worker that is stuck is killed, where its unit is all that is left and
    another worker is free to make it."""
    code: str = ""
    """`durable.code.source_hash()` that workers must have too; not compared where empty."""


@dataclass(frozen=True)
class WorkerView:
    """A worker at one moment."""

    number: int
    pid: int | None
    """None where it has no process at the moment."""
    device: int | None
    state: str
    unit: str | None
    """The key that it is working on."""
    since: float
    """When the state began, in seconds since the epoch."""


@dataclass(frozen=True)
class Snapshot:
    """All workers, and what has become of the units, at one moment."""

    workers: tuple[WorkerView, ...]
    meters: DepotMeters
    redone: int = 0
    """Units handed out again after a failure or a death."""


@dataclass(frozen=True)
class Outcome:
    """What a call has come to."""

    verified: int
    """Units that the store holds, verified."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Key to the reason."""
    redone: int = 0
    """Units handed out again after a failure or a death."""
    deaths: int = 0
    """Worker processes that ended without having been asked to."""


@dataclass(frozen=True)
class Callbacks:
    """How a call tells what happens; see `supervise`."""

    on_verified: Callable[[Task, Made | None, Stat], None]
    on_event: Callable[[str, dict[str, Any]], None]
    on_tick: Callable[[Snapshot], None]


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise ValueError where a key appears twice."""
    seen: set[str] = set()
    for task in tasks:
        if task.key in seen:
            raise ValueError(f"{task.key} is among the tasks twice")
        seen.add(task.key)
