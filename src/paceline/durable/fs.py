"""The file-system seam: every byte that has to survive goes through `FileSystem`.

Tests put a faulty or a crashing one in its place; nothing else in `durable` calls the operating
system to write.
"""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol
from zlib import crc32

from paceline.durable.processes import is_writer


class FileSystem(Protocol):
    """The calls that change a disk."""

    def open_new(self, path: Path) -> BinaryIO:
        """Create or empty a file for writing."""
        ...

    def open_append(self, path: Path) -> BinaryIO:
        """Open a file for appending, creating it; unbuffered, so a failed write leaves no rest."""
        ...

    def lock(self, file: BinaryIO, *, shared: bool = False) -> bool:
        """Take the file for this process until it is closed; False where another one holds it.

        Shared, several may hold it, and nobody who wants it for itself.
        """
        ...

    def is_at(self, file: BinaryIO, path: Path) -> bool:
        """Whether the open file is still the one that `path` names."""
        ...

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        ...

    def sync(self, file: BinaryIO) -> None:
        """Return once the file's bytes are on the device."""
        ...

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to `size` bytes and make that durable."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename over `target`, atomically."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, atomically. Raises FileExistsError where something has it."""
        ...

    def sync_dir(self, path: Path) -> None:
        """Return once the folder's entries are on the device."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file; absent is fine."""
        ...

    def make_dirs(self, path: Path) -> None:
        """Create a folder with its parents, durably."""
        ...


class RealFileSystem:
    """The operating system's."""

    def open_new(self, path: Path) -> BinaryIO:  # noqa: D102
        return path.open("wb")

    def open_append(self, path: Path) -> BinaryIO:  # noqa: D102
        return path.open("ab", buffering=0)

    def lock(self, file: BinaryIO, *, shared: bool = False) -> bool:  # noqa: D102
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, file: BinaryIO, path: Path) -> bool:  # noqa: D102
        try:
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            return False

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:  # noqa: D102
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:  # noqa: D102
        file.flush()
        os.fsync(file.fileno())

    def truncate(self, path: Path, size: int) -> None:  # noqa: D102
        with path.open("r+b") as file:
            file.truncate(size)
            self.sync(file)

    def replace(self, source: Path, target: Path) -> None:  # noqa: D102
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:  # noqa: D102
        target.hardlink_to(source)

    def sync_dir(self, path: Path) -> None:  # noqa: D102
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def unlink(self, path: Path) -> None:  # noqa: D102
        path.unlink(missing_ok=True)

    def make_dirs(self, path: Path) -> None:  # noqa: D102
        if path.is_dir():
            return
        self.make_dirs(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_dir(path.parent)


REAL_FS: FileSystem = RealFileSystem()
"""Stateless, hence shared."""


PARTIAL = ".partial"
"""Suffix of a file that is being written; such a file never counts as content."""

_DAY = 86_400.0

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that know one name a file."""


@contextmanager
def atomic_file(path: Path, *, fs: FileSystem = REAL_FS) -> Iterator[BinaryIO]:
    """Write a file that appears under its final name only when whole and durable.

    Yields the temporary file, `<name>.<host>.<pid>.partial` in the same folder; write to it
    with `fs.write`. On an exception the temporary file is removed and the final name is as it was
    before. The process id keeps a killed run's surviving worker out of its successor's file, and
    `<host>` those of two machines that share the folder, where process ids may be the same.
    """
    fs.make_dirs(path.parent)
    partial = partial_of(path)
    try:
        file = fs.open_new(partial)
        try:
            yield file
            fs.sync(file)
        finally:
            file.close()
        fs.replace(partial, path)
    except BaseException as error:
        # A failed write knows its descriptor alone, and nobody asked for the temporary name: the
        # file is what a reader can act on.
        is_nameless = isinstance(error, OSError) and error.filename in (None, str(partial))
        if isinstance(error, OSError) and error.errno is not None and is_nameless:
            error.filename = str(path)
        # Where it was not made it may not be removed either, and that would hide why.
        with suppress(OSError):
            fs.unlink(partial)
        raise
    fs.sync_dir(path.parent)


def partial_of(path: Path) -> Path:
    """The name by which this process alone knows a file that is not at `path` yet."""
    return path.with_name(f"{path.name}.{_host()}.{os.getpid()}{PARTIAL}")


def settle(source: Path, target: Path, *, fs: FileSystem = REAL_FS) -> bool:
    """Give a durable file its final name, durably, unless something has that: False then.

    Of several who do this at once, on whatever machines, one succeeds. Only where the file system
    knows no hard links the last of those that come within a moment does.
    """
    try:
        fs.link(source, target)
    except FileExistsError:
        try:
            # A network mount may ask twice, and be told of its own first try.
            if not source.samefile(target):
                return False
        except FileNotFoundError:
            # Removed since, or a link to nothing.
            fs.replace(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            return False
        fs.replace(source, target)
    fs.sync_dir(target.parent)
    fs.unlink(source)
    return True


def _written(path: Path) -> float:
    """When; in a network mount by the server's clock. Never for one that is gone."""
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return float("inf")


def _host() -> str:
    """A word for this machine; containers have host names of their own, and equal process ids."""
    return f"{crc32(socket.gethostname().encode()):08x}"


def write_atomic(path: Path, data: bytes, *, fs: FileSystem = REAL_FS) -> None:
    """Write `data` to `path` durably; see `atomic_file`."""
    with atomic_file(path, fs=fs) as file:
        fs.write(file, data)


def remove_dead_partials(
    folder: Path, *, is_shared: bool = False, fs: FileSystem = REAL_FS
) -> list[str]:
    """Remove what killed processes left in `folder`; return the names.

    Where the folder `is_shared`, those of other machines may be alive: they are left until nothing
    was written to them for a day.
    """
    removed = []
    old = time.time() - _DAY
    for path in sorted(folder.glob(f"*{PARTIAL}")):
        owner = re.search(rf"(?:\.([0-9a-f]{{8}}))?\.(\d+)\{PARTIAL}$", path.name)
        if owner is None:
            continue
        if is_shared and owner[1] not in (None, _host()):
            is_dead = _written(path) < old
        else:
            is_dead = not is_writer(int(owner[2]), path)
        if is_dead:
            fs.unlink(path)
            removed.append(path.name)
    return removed
