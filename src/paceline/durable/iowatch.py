"""I/O that does not return: which call, on which path, since when; looked at from another thread.

A frozen disk gives no error. The thread that asked for the bytes sleeps in the kernel, deaf even
to SIGKILL, so only somebody else can say what it waits for.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.durable.fs import FileSystem

_PROC = Path("/proc")

FROZEN = "D"
"""The state of a thread that the kernel holds in a read or write; no signal reaches it."""


@dataclass(frozen=True)
class Ongoing:
    """A call that has not returned yet."""

    thread_id: int
    """The system's number of the thread."""
    what: str
    """The call: `write`, `sync`, `open`."""
    path: str
    seconds: float
    """Since it began, or since the last call inside of it returned."""
    slack: float = 0.0
    """Seconds by which it may take longer than other calls before it is old."""


class _Call:
    __slots__ = ("path", "since", "slack", "what")

    def __init__(self, what: str, path: str, slack: float) -> None:
        self.what = what
        self.path = path
        self.slack = slack
        self.since = time.monotonic()


class IoWatch:
    """Knows the calls that are going on, by thread; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, list[_Call]] = {}

    @contextmanager
    def call(self, what: str, path: Path | str = "", *, slack: float = 0.0) -> Iterator[None]:
        """Everything inside counts as one call; of nested ones the innermost is told.

        `slack` are seconds by which it may take longer than other calls before it is old.
        """
        thread = threading.get_native_id()
        entry = _Call(what, str(path), slack)
        with self._lock:
            self._calls.setdefault(thread, []).append(entry)
        try:
            yield
        finally:
            with self._lock:
                stack = self._calls[thread]
                stack.remove(entry)
                if stack:
                    # A call inside returned, so the outer one is slow, not frozen.
                    stack[-1].since = time.monotonic()
                else:
                    del self._calls[thread]

    def ongoing(self, older_than: float = 0.0) -> list[Ongoing]:
        """Calls that have lasted `older_than` seconds or more, the longest first.

        Where that is 0 all of them; else those with a slack when that is over too.
        """
        now = time.monotonic()
        with self._lock:
            inner = [(thread, stack[-1]) for thread, stack in self._calls.items()]
            found = [
                Ongoing(thread, call.what, call.path, now - call.since, call.slack)
                for thread, call in inner
                if now - call.since >= older_than + (call.slack if older_than else 0.0)
            ]
        return sorted(found, key=lambda call: -call.seconds)


class WatchedFs:
    """A file system each call of which is known to a watch."""

    def __init__(self, inner: FileSystem, watch: IoWatch) -> None:
        self._inner = inner
        self._watch = watch

    def open_new(self, path: Path) -> BinaryIO:
        """See `FileSystem.open_new`."""
        with self._watch.call("open", path):
            return self._inner.open_new(path)

    def open_append(self, path: Path) -> BinaryIO:
        """See `FileSystem.open_append`."""
        with self._watch.call("open", path):
            return self._inner.open_append(path)

    def lock(self, file: BinaryIO, *, shared: bool = False) -> bool:
        """See `FileSystem.lock`."""
        with self._watch.call("lock", _name(file)):
            return self._inner.lock(file, shared=shared)

    def is_at(self, file: BinaryIO, path: Path) -> bool:
        """See `FileSystem.is_at`."""
        with self._watch.call("stat", path):
            return self._inner.is_at(file, path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        with self._watch.call("write", _name(file)):
            self._inner.write(file, data)

    def sync(self, file: BinaryIO) -> None:
        """See `FileSystem.sync`."""
        with self._watch.call("sync", _name(file)):
            self._inner.sync(file)

    def truncate(self, path: Path, size: int) -> None:
        """See `FileSystem.truncate`."""
        with self._watch.call("truncate", path):
            self._inner.truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:
        """See `FileSystem.replace`."""
        with self._watch.call("rename", target):
            self._inner.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `FileSystem.link`."""
        with self._watch.call("link", target):
            self._inner.link(source, target)

    def sync_dir(self, path: Path) -> None:
        """See `FileSystem.sync_dir`."""
        with self._watch.call("sync", path):
            self._inner.sync_dir(path)

    def unlink(self, path: Path) -> None:
        """See `FileSystem.unlink`."""
        with self._watch.call("remove", path):
            self._inner.unlink(path)

    def make_dirs(self, path: Path) -> None:
        """See `FileSystem.make_dirs`."""
        with self._watch.call("make folder", path):
            self._inner.make_dirs(path)


def process_state(pid: int, tid: int | None = None) -> str:
    """The kernel's letter for what a thread does, such as `S` (sleeps) or `D` (frozen in I/O).

    Without `tid`: `D` where any thread of the process is in it, else the main thread's. Empty
    where there is no such thread, or no `/proc`.
    """
    if tid is not None:
        return _thread_state(pid, tid)
    try:
        threads = [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
    except OSError:
        return ""
    if any(_thread_state(pid, thread) == FROZEN for thread in threads):
        return FROZEN
    return _thread_state(pid, pid)


class FreezeWatch:
    """Whether a process's main thread is held by the kernel, in calls that no `IoWatch` knows.

    State D alone says little: a slow disk keeps its reader there most of the time. Frozen is a
    thread that is in it at every look and has not been woken once in between.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._wakings: int | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """How long it has been frozen, as far as the looks tell; 0 where it is not."""
        now = time.monotonic()
        wakings = None
        if _thread_state(self._pid, self._pid) == FROZEN:
            wakings = _wakings(self._pid)
        if wakings is None or wakings != self._wakings:
            self._wakings = wakings
            self._since = now
            return 0.0
        return now - self._since


def _thread_state(pid: int, tid: int) -> str:
    try:
        text = (_PROC / str(pid) / "task" / str(tid) / "stat").read_text(errors="replace")
    except OSError:
        return ""
    # The name in parentheses may hold spaces and parentheses itself.
    return text.rpartition(")")[2].split()[0]


def _wakings(pid: int) -> int | None:
    """How often the main thread has given up its core so far."""
    try:
        lines = (_PROC / str(pid) / "task" / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches" in line)


def _name(file: BinaryIO) -> str:
    return str(getattr(file, "name", ""))
