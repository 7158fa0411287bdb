"""Local copies of an object store's shards, bounded in bytes."""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import Interrupted, ShardDamaged, StoreFailed, UserError
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.limit import Call
from paceline.durable.store import Store
from paceline.features.manifest import UnitEntry

_LOG = logging.getLogger(__name__)

_PART = 8 << 20
_PARTS_AT_A_TIME = 4
_TRIES = 3
"""Fetches of an object that arrives as something else before that is held to be its content."""

_FETCH = ".fetch"
"""Suffix of a file that is being fetched, behind the bytes it will have."""

_LOCK = "cache.lock"
_TOLD_EVERY = 30.0
_GLANCE = 0.1
"""Seconds between two looks whether a fetch is still wanted."""


class ShardCache:
    """A folder of copies, shared by any number of readers in any number of processes.

    A copy has its name only when it is whole. The one that was used longest ago goes first; a
    reader that has it open keeps its bytes until it lets go. Nothing is synced: what a crash
    tears, the reader's checksums find, and it is fetched again.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        below: str,
        *,
        limit: int | None = None,
        patience: float = 300.0,
        unwanted: Callable[[], bool] = lambda: False,
        fs: FileSystem = REAL_FS,
    ) -> None:
        """Copies of `store`'s objects in `folder`/`below`, at most `limit` bytes in all `folder`.

        Without a limit they may have half of what is free, counting what they have already.
        `patience` are seconds over which an error of the store that may pass is tried again.
        `unwanted` is asked all the time while a fetch waits, and ends it by its True.
        """
        self._folder = folder
        self._store = store
        self._copies = folder / below
        self._patience = patience
        self._unwanted = unwanted
        self._fs = fs
        fs.make_dirs(folder)
        if limit is None:
            limit = (shutil.disk_usage(folder).free + sum(map(_size, self._files()))) // 2
        self.limit = limit
        """Bytes that the copies may have together."""

    def path(self, key: str) -> Path:
        """Where the copy of an object is, or would be."""
        return self._copies / key

    def touch(self, key: str) -> None:
        """Note that the copy was used just now."""
        with suppress(FileNotFoundError):
            os.utime(self.path(key))

    def drop(self, key: str) -> None:
        """Remove the copy of an object, if there is one."""
        self._fs.unlink(self.path(key))

    def fetch(self, entry: UnitEntry) -> None:
        """Have a copy of the object, fetched by this call or meanwhile by another reader.

        Raises ShardDamaged where the store has another object than the manifest lists, or none;
        StoreFailed where it does not answer for too long, or says no; UserError for an object
        larger than the limit; OSError where the disk refuses; Interrupted where `unwanted` says
        so, whatever the store is at.
        """
        if entry.size > self.limit:
            raise UserError(
                f"train.cache_bytes: {self.limit:,} bytes are less than one shard "
                f"({entry.key}, {entry.size:,}). Allow more, or make room in {self._folder}."
            )
        path = self.path(entry.key)
        self._fs.make_dirs(path.parent)
        partial = path.with_name(f"{path.name}.{entry.size}{_FETCH}")
        with self._held(partial, f"another reader fetches {entry.key}") as file:
            if not path.exists():
                self._make_room(entry.size, partial)
                try:
                    self._download(entry, file, partial)
                except BaseException:
                    self._fs.unlink(partial)
                    raise
                self._fs.replace(partial, path)
            else:
                self._fs.unlink(partial)

    def _download(self, entry: UnitEntry, file: BinaryIO, partial: Path) -> None:
        where = f"{self._store.url}/{entry.key}"
        for _ in range(_TRIES):
            # A fetch that was killed, or the last try, may have left bytes.
            self._fs.truncate(partial, 0)
            checksum = size = 0
            for part in self._parts(entry, where):
                self._fs.write(file, part)
                checksum = crc64(part, checksum)
                size += len(part)
            if (size, crc64_hex(checksum)) == (entry.size, entry.crc64):
                return
            _LOG.warning("%s: arrived as something else; fetched again", where)
        raise ShardDamaged(
            f"{where} is not the object that the manifest lists ({entry.size} bytes, checksum "
            f"{entry.crc64}). Run `paceline verify` with --repair, or `paceline extract` again."
        )

    def _parts(self, entry: UnitEntry, where: str) -> Iterator[bytes]:
        starts = range(0, entry.size, _PART)
        calls = [
            partial(self._store.get_range, entry.key, start, min(start + _PART, entry.size))
            for start in starts
        ]
        try:
            for first in range(0, len(calls), _PARTS_AT_A_TIME):
                some = calls[first : first + _PARTS_AT_A_TIME]
                for call, begun in zip(some, [Call(c, "fetch") for c in some], strict=True):
                    yield self._patiently(call, begun, where)
        except KeyError as error:
            raise ShardDamaged(
                f"{where} is gone from the store. Run `paceline extract` again: it redoes what is "
                "missing."
            ) from error
        except ValueError as error:
            raise ShardDamaged(
                f"{where} is shorter than the {entry.size} bytes that the manifest lists. Run "
                "`paceline extract` again: it redoes such shards."
            ) from error

    def _patiently(self, call: Callable[[], bytes], begun: Call[bytes], where: str) -> bytes:
        """The result of a call that has begun, made again where its error may pass."""
        since = time.monotonic()
        told, pause = -_TOLD_EVERY, 0.5
        while True:
            while not begun.wait(_GLANCE):
                self._require_wanted(where)
            try:
                return begun.finish()
            except StoreFailed as error:
                waited = time.monotonic() - since
                if not error.transient or waited >= self._patience:
                    raise
                if waited - told >= _TOLD_EVERY:
                    told = waited
                    _LOG.warning("%s: %s; tried again for %.0f s", where, error, self._patience)
            self._pause(min(pause, max(0.0, self._patience - waited)), where)
            pause = min(2 * pause, 15.0)
            begun = Call(call, "fetch")

    def _pause(self, seconds: float, where: str) -> None:
        while seconds > 0:
            self._require_wanted(where)
            time.sleep(min(seconds, _GLANCE))
            seconds -= _GLANCE

    def _require_wanted(self, where: str) -> None:
        if self._unwanted():
            raise Interrupted(f"{where}: its fetch was given up.")

    def _make_room(self, size: int, own: Path) -> None:
        """Remove copies, the longest unused first, until `size` more bytes are within the limit.

        `own`, the file to be filled, is there already and counts with its later size: whoever
        makes room next sees it.
        """
        with self._held(self._folder / _LOCK, "another reader makes room"):
            files = sorted(self._files(), key=_used)
            total = sum(_size(path) for path in files if path != own) + size
            for path in files:
                if total <= self.limit:
                    return
                counted = _size(path)
                if path != own and self._removed(path):
                    total -= counted

    def _removed(self, path: Path) -> bool:
        """Remove a copy, or a fetch that nobody is at any more."""
        if path.suffix != _FETCH:
            self._fs.unlink(path)
            return True
        with suppress(FileNotFoundError), path.open("rb") as file:
            if self._fs.lock(file):
                self._fs.unlink(path)
                return True
        return False

    def _files(self) -> list[Path]:
        return [p for p in self._folder.rglob("*") if p.name != _LOCK and p.is_file()]

    @contextmanager
    def _held(self, path: Path, meanwhile: str) -> Iterator[BinaryIO]:
        """Open a file and hold its lock, once no other reader does; create it where it is not."""
        begun = told = time.monotonic()
        while True:
            with self._fs.open_append(path) as file:
                # Who had it before us may have renamed or removed it.
                if self._fs.lock(file) and self._fs.is_at(file, path):
                    yield file
                    return
            if time.monotonic() - told >= _TOLD_EVERY:
                told = time.monotonic()
                _LOG.warning("%s, for %.0f s now: waiting", meanwhile, told - begun)
            self._require_wanted(str(path))
            time.sleep(0.05)


def _size(path: Path) -> int:
    """Bytes that a file counts for; 0 where it is gone."""
    planned = _size_by_name(path)
    if planned is not None:
        return planned
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size_by_name(path: Path) -> int | None:
    """What a file that is being fetched will have."""
    found = re.search(rf"\.(\d+)\{_FETCH}$", path.name)
    return int(found[1]) if found else None


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
