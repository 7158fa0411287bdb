"""Disks that lose power and disks that fail: file systems for tests and for `make torture`.

`CrashFs` performs its calls in a real folder, so that whatever reads finds the bytes, and keeps a
model of what a device would hold: bytes and names that were not synced may be there or not.
"""

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal
from weakref import WeakKeyDictionary

from paceline.durable.fs import FileSystem, RealFileSystem

Keep = Literal["none", "all"] | int
"""Which unsynced effects a crash leaves: none, all, or a subset drawn with this seed."""

Disk = dict[str, bytes | None]
"""Files and folders (None) by path below the root."""


class Crashed(BaseException):
    """The power is gone: no handler of the program under test may go on from here."""


class UnsyncedFs(RealFileSystem):
    """The operating system's, without waiting for the device: right while nothing crashes."""

    def sync(self, file: BinaryIO) -> None:
        """Hand the bytes to the operating system."""
        file.flush()

    def sync_dir(self, path: Path) -> None:
        """Nothing."""


@dataclass(eq=False)
class _Node:
    """A file's bytes: those on the device, and the changes since."""

    synced: bytes = b""
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes (offset, bytes); (size, b"") cuts or extends to a size."""

    size: int = 0


@dataclass(frozen=True)
class _Entry:
    """A change of names in one folder, as one step: a new name, a rename, a removal."""

    folder: str
    node: _Node
    gone: str | None
    here: str | None


class CrashFs:
    """Loses power behind call `crash_after`: that one is the last to have an effect.

    Everything is below `root`, whose present content counts as durable. Calls that change the
    disk are counted in `calls` and named in `trace`; every call after the crash raises Crashed.
    """

    def __init__(self, root: Path, *, crash_after: int | None = None) -> None:
        self._root = root
        self._inner = UnsyncedFs()
        self._crash_after = crash_after
        self._lock = threading.RLock()
        self._nodes: WeakKeyDictionary[BinaryIO, _Node] = WeakKeyDictionary()
        self._folders = {self._name(p) for p in [root, *root.rglob("*")] if p.is_dir()}
        self._names: dict[str, _Node] = {}
        for path in root.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                self._names[self._name(path)] = _Node(data, size=len(data))
        self._durable = dict(self._names)
        self._entries: list[_Entry] = []
        self.trace: list[str] = []

    @property
    def calls(self) -> int:
        """Calls that have changed the disk."""
        return len(self.trace)

    @property
    def has_crashed(self) -> bool:
        """Whether the last call of this disk has been made."""
        return self._crash_after is not None and self.calls >= self._crash_after

    def disk(self, keep: Keep) -> Disk:
        """What the device holds if the power goes now.

        Unsynced bytes may be missing, shortened or zero; unsynced names old or new, each by
        itself: no order among them is promised.
        """
        rng = random.Random(keep) if isinstance(keep, int) else None
        with self._lock:
            names = dict(self._durable)
            for entry in self._entries:
                if keep == "all" or (rng is not None and rng.random() < 0.5):
                    _apply(entry, names)
            found: Disk = dict.fromkeys(self._folders)
            for name, node in names.items():
                found[name] = _content(node, keep, rng)
            return found

    # ---- FileSystem

    def open_new(self, path: Path) -> BinaryIO:  # noqa: D102
        with self._lock:
            self._call("open_new", path)
            file = self._inner.open_new(path)
            node = self._node_at(path)
            if node.size:
                node.changes.append((0, b""))
                node.size = 0
            self._nodes[file] = node
            return file

    def open_append(self, path: Path) -> BinaryIO:  # noqa: D102
        with self._lock:
            self._call("open_append", path)
            file = self._inner.open_append(path)
            self._nodes[file] = self._node_at(path)
            return file

    def lock(self, file: BinaryIO, *, shared: bool = False) -> bool:  # noqa: D102
        self._refuse_after_crash()
        return self._inner.lock(file, shared=shared)

    def is_at(self, file: BinaryIO, path: Path) -> bool:  # noqa: D102
        self._refuse_after_crash()
        return self._inner.is_at(file, path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:  # noqa: D102
        with self._lock:
            self._call("write", Path(file.name))
            self._inner.write(file, data)
            node = self._nodes[file]
            written = bytes(data)
            if written:
                node.changes.append((node.size, written))
                node.size += len(written)

    def sync(self, file: BinaryIO) -> None:  # noqa: D102
        with self._lock:
            self._call("sync", Path(file.name))
            self._inner.sync(file)
            _settle(self._nodes[file])

    def truncate(self, path: Path, size: int) -> None:  # noqa: D102
        with self._lock:
            self._call("truncate", path)
            self._inner.truncate(path, size)
            node = self._names[self._name(path)]
            node.changes.append((size, b""))
            node.size = size
            _settle(node)

    def replace(self, source: Path, target: Path) -> None:  # noqa: D102
        with self._lock:
            self._call("replace", target)
            self._inner.replace(source, target)
            gone, here = self._name(source), self._name(target)
            self._change(_Entry(self._name(target.parent), self._names[gone], gone, here))

    def link(self, source: Path, target: Path) -> None:  # noqa: D102
        with self._lock:
            self._call("link", target)
            self._inner.link(source, target)
            node = self._names[self._name(source)]
            self._change(_Entry(self._name(target.parent), node, None, self._name(target)))

    def sync_dir(self, path: Path) -> None:  # noqa: D102
        with self._lock:
            self._call("sync_dir", path)
            name = self._name(path)
            for entry in [e for e in self._entries if e.folder == name]:
                _apply(entry, self._durable)
                self._entries.remove(entry)

    def unlink(self, path: Path) -> None:  # noqa: D102
        with self._lock:
            self._call("unlink", path)
            self._inner.unlink(path)
            node = self._names.get(self._name(path))
            if node is not None:
                self._change(_Entry(self._name(path.parent), node, self._name(path), None))

    def make_dirs(self, path: Path) -> None:  # noqa: D102
        with self._lock:
            if path.is_dir():
                self._refuse_after_crash()
                return
            self._call("make_dirs", path)
            self._inner.make_dirs(path)
            below = path.relative_to(self._root)
            self._folders |= {self._name(self._root / p) for p in (below, *below.parents)}

    # ---- the model

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _call(self, what: str, path: Path) -> None:
        self._refuse_after_crash()
        self.trace.append(f"{what} {self._name(path)}")

    def _refuse_after_crash(self) -> None:
        if self.has_crashed:
            raise Crashed(f"the power went after call {self._crash_after}")

    def _node_at(self, path: Path) -> _Node:
        name = self._name(path)
        if name not in self._names:
            self._change(_Entry(self._name(path.parent), _Node(), None, name))
        return self._names[name]

    def _change(self, entry: _Entry) -> None:
        _apply(entry, self._names)
        self._entries.append(entry)


def restore(disk: Disk, root: Path) -> None:
    """Put a disk into the empty or missing folder `root`."""
    for name, data in sorted(disk.items()):
        path = root / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _apply(entry: _Entry, names: dict[str, _Node]) -> None:
    # The name may be another file's where an earlier change was lost.
    if entry.gone is not None and names.get(entry.gone) is entry.node:
        del names[entry.gone]
    if entry.here is not None:
        names[entry.here] = entry.node


def _settle(node: _Node) -> None:
    node.synced = _content(node, "all", None)
    node.changes.clear()


def _content(node: _Node, keep: Keep, rng: random.Random | None) -> bytes:
    data = bytearray(node.synced)
    if keep == "none":
        return bytes(data)
    for offset, written in node.changes:
        fate = "kept" if rng is None else rng.choice(("kept", "lost", "short", "zero"))
        if fate == "lost":
            continue
        if not written:
            data[offset:] = bytes(max(0, offset - len(data)))
            continue
        if fate == "short" and rng is not None:
            written = written[: rng.randrange(len(written))]
        elif fate == "zero":
            written = bytes(len(written))
        if written:
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + len(written)] = written
    return bytes(data)


class FaultyFs:
    """Fails call `fail_at` (from 1) with `error`, and with `forever` every one behind it.

    With `block` the call does not return until `release`, and raises then. A write that fails
    has written half. `fail_at` 0 never fails, and counts.
    """

    def __init__(
        self,
        inner: FileSystem,
        *,
        fail_at: int,
        error: int,
        forever: bool = False,
        block: bool = False,
    ) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self._error = error
        self._forever = forever
        self._block = block
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.calls = 0
        self.is_blocked = threading.Event()
        """Set once a call hangs."""

        self.blocked_in = ""
        """The name of the thread that hangs."""

    def release(self) -> None:
        """Let calls that hang fail."""
        self._released.set()

    def open_new(self, path: Path) -> BinaryIO:  # noqa: D102
        self._step(path)
        return self._inner.open_new(path)

    def open_append(self, path: Path) -> BinaryIO:  # noqa: D102
        self._step(path)
        return self._inner.open_append(path)

    def lock(self, file: BinaryIO, *, shared: bool = False) -> bool:  # noqa: D102
        return self._inner.lock(file, shared=shared)

    def is_at(self, file: BinaryIO, path: Path) -> bool:  # noqa: D102
        return self._inner.is_at(file, path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:  # noqa: D102
        try:
            self._step(Path(file.name))
        except OSError:
            self._inner.write(file, memoryview(data).cast("B")[: len(data) // 2])
            raise
        self._inner.write(file, data)

    def sync(self, file: BinaryIO) -> None:  # noqa: D102
        self._step(Path(file.name))
        self._inner.sync(file)

    def truncate(self, path: Path, size: int) -> None:  # noqa: D102
        self._step(path)
        self._inner.truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:  # noqa: D102
        self._step(target)
        self._inner.replace(source, target)

    def link(self, source: Path, target: Path) -> None:  # noqa: D102
        self._step(target)
        self._inner.link(source, target)

    def sync_dir(self, path: Path) -> None:  # noqa: D102
        self._step(path)
        self._inner.sync_dir(path)

    def unlink(self, path: Path) -> None:  # noqa: D102
        self._step(path)
        self._inner.unlink(path)

    def make_dirs(self, path: Path) -> None:  # noqa: D102
        self._step(path)
        self._inner.make_dirs(path)

    def _step(self, path: Path) -> None:
        with self._lock:
            self.calls += 1
            number = self.calls
        if not (number == self._fail_at or (self._forever and 0 < self._fail_at < number)):
            return
        if self._block:
            self.blocked_in = threading.current_thread().name
            self.is_blocked.set()
            self._released.wait()
        raise OSError(self._error, os.strerror(self._error), str(path))
