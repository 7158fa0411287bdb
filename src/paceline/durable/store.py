"""Stores: named, immutable objects behind six methods.

`LocalStore` and `MemoryStore` here; every store passes the same contract test-suite.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Protocol

from paceline.durable.checksum import crc64, crc64_file, crc64_hex
from paceline.durable.errors import IntegrityError
from paceline.durable.fs import (
    PARTIAL,
    REAL_FS,
    FileSystem,
    atomic_file,
    partial_of,
    settle,
)

Source = Path | bytes | bytearray | memoryview
"""What is put: a file, or bytes in memory."""

_BLOCK = 8 << 20
_SEGMENT = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*")


@dataclass(frozen=True)
class Stat:
    """What a store knows about an object."""

    size: int
    """Bytes."""

    crc64: int
    """CRC64NVME of the whole object."""


@dataclass(frozen=True)
class Listed:
    """An object in a listing."""

    key: str
    """Its name in the store."""

    size: int
    """Bytes."""


class Store(Protocol):
    """Objects under keys, `folder/name`: ASCII letters, digits and `._=+-` between slashes."""

    @property
    def url(self) -> str:
        """Where the store is, for people and for the recipe."""
        ...

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """Store an object: when this returns it is whole, durable and verified; never partly seen.

        Replaces an object of that key. Raises IntegrityError where the bytes stored are not the
        ones that `crc64` promises (the key is then as it was before), ValueError for a key
        outside the grammar.
        """
        ...

    def head(self, key: str) -> Stat | None:
        """Size and checksum of the bytes that are there now; None where there is no object."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes [start, end). Raises KeyError without the object, ValueError outside of it."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects whose keys begin with `prefix` and sort behind `after`, in the order of keys."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, durably; absent ones are fine."""
        ...


def check_key(key: str) -> None:
    """Raise ValueError for a key that could leave the store or hide in it."""
    if key.endswith(PARTIAL) or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise ValueError(f"{key!r} is not a key: letters, digits and `._=+-` between slashes")


def write_verified(
    path: Path,
    chunks: Iterable[bytes | memoryview],
    *,
    expected: int | None = None,
    fs: FileSystem = REAL_FS,
) -> Stat:
    """Write `chunks` to a file that appears whole, durable and read back, or not at all.

    `expected` is the CRC64NVME of all chunks where the caller has it already. Raises
    IntegrityError where the file holds something else, OSError where the disk refuses.
    """
    computed = 0
    size = 0
    with atomic_file(path, fs=fs) as file:
        for chunk in chunks:
            fs.write(file, chunk)
            size += memoryview(chunk).nbytes
            if expected is None:
                computed = crc64(chunk, computed)
        fs.sync(file)
        wanted = computed if expected is None else expected
        partial = Path(file.name)
        found = Stat(partial.stat().st_size, crc64_file(partial))
        if found != Stat(size, wanted):
            raise IntegrityError(
                f"{path}: wrote {size} bytes with checksum {crc64_hex(wanted)}, read back "
                f"{found.size} with {crc64_hex(found.crc64)}. Suspect the disk or the memory."
            )
    return found


class LocalStore:
    """A folder; keys are paths below it."""

    def __init__(self, root: Path, *, fs: FileSystem = REAL_FS) -> None:
        self._root = root
        self._fs = fs

    @property
    def url(self) -> str:
        """`file://` and the absolute path."""
        return self._root.absolute().as_uri()

    def path(self, key: str) -> Path:
        """The file of a key, whether it exists or not. Raises ValueError for a bad key."""
        check_key(key)
        return self._root / key

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`; the bytes are read back before the final name appears."""
        chunks = _blocks(source) if isinstance(source, Path) else (memoryview(source),)
        return write_verified(self.path(key), chunks, expected=crc64, fs=self._fs)

    def create(self, key: str, data: bytes) -> Stat:
        """Put an object where there is none; of several writers one succeeds (`fs.settle`).

        Raises IntegrityError where other bytes stand under the key, else as `put`.
        """
        path = self.path(key)
        partial = partial_of(path)
        try:
            stat = write_verified(partial, [data], fs=self._fs)
            if not settle(partial, path, fs=self._fs) and self.head(key) != stat:
                raise IntegrityError(f"{path}: it is there already, and holds something else")
        finally:
            self._fs.unlink(partial)
        return stat

    def head(self, key: str) -> Stat | None:
        """See `Store.head`; reads the whole file."""
        path = self.path(key)
        if not path.is_file():
            return None
        return Stat(path.stat().st_size, crc64_file(path))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        path = self.path(key)
        if not path.is_file():
            raise KeyError(key)
        check_range(key, start, end, path.stat().st_size)
        with path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`; files that are being written, and foreign names, are left out."""
        names = (path.relative_to(self._root).as_posix() for path in self._root.rglob("*"))
        for key in sorted(k for k in names if k.startswith(prefix) and k > after and is_key(k)):
            try:
                found = (self._root / key).stat()
            except FileNotFoundError:
                continue  # deleted while the list was read
            if S_ISREG(found.st_mode):
                yield Listed(key, found.st_size)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        paths = [self.path(key) for key in keys]
        for path in paths:
            self._fs.unlink(path)
        for folder in sorted({path.parent for path in paths}):
            if folder.is_dir():
                self._fs.sync_dir(folder)


class MemoryStore:
    """A dictionary; for tests and for stages that hand over within one process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """`memory:`, there is only the one object."""
        return "memory:"

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`."""
        check_key(key)
        data = source.read_bytes() if isinstance(source, Path) else bytes(source)
        stat = _stat(data)
        if crc64 is not None and crc64 != stat.crc64:
            raise IntegrityError(
                f"{key}: got bytes with checksum {crc64_hex(stat.crc64)}, not {crc64_hex(crc64)}"
            )
        self._objects[key] = data
        return stat

    def head(self, key: str) -> Stat | None:
        """See `Store.head`."""
        check_key(key)
        data = self._objects.get(key)
        return None if data is None else _stat(data)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        check_key(key)
        data = self._objects[key]
        check_range(key, start, end, len(data))
        return data[start:end]

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`."""
        keys = sorted(self._objects)
        for key in keys[bisect_right(keys, after) :]:
            if key.startswith(prefix) and key in self._objects:
                yield Listed(key, len(self._objects[key]))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        names = list(keys)
        for key in names:
            check_key(key)
        for key in names:
            self._objects.pop(key, None)


def _stat(data: bytes) -> Stat:
    return Stat(len(data), crc64(data))


def is_key(name: str) -> bool:
    """Whether a name found in a store can be one of ours."""
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def check_range(key: str, start: int, end: int, size: int) -> None:
    """Raise ValueError for bytes [start, end) that an object of `size` bytes does not have."""
    if not 0 <= start <= end <= size:
        raise ValueError(f"{key}: bytes {start} to {end} of an object of {size}")


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
