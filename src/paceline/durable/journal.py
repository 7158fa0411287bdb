"""The journal: an append-only record of what is done, and the truth after any crash.

One line per record, `crc32hex SP json LF`. The checksum covers the JSON; the JSON holds `v` (the
format's version), `seq` (0, 1, 2, ...) and the record's own keys.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from paceline.durable.errors import IntegrityError, JournalDamaged, UserError
from paceline.durable.fs import REAL_FS, FileSystem

FORMAT_VERSION = 1

_CRC_DIGITS = 8


class Journal:
    """Opened by its only writer; usable as a context manager.

    Opening cuts a torn tail, durably. Raises JournalDamaged, naming file and line, where a bad
    record is followed by good ones or the numbering has a gap, and UserError where another
    process has the journal open.
    """

    def __init__(
        self,
        path: Path,
        *,
        fs: FileSystem = REAL_FS,
        on_record: Callable[[dict[str, Any], int], None] | None = None,
    ) -> None:
        """`on_record` gets each durable record, found or added, and the byte its line begins at.

        No record is kept in memory then: `records` is empty, and `record_at` reads one again.
        """
        self.path = path
        self._fs = fs
        self._on_record = on_record
        self._records: list[dict[str, Any]] = []
        self._count = self._size = 0
        fs.make_dirs(path.parent)
        is_new = not path.exists()
        self._file = fs.open_append(path)
        try:
            if not fs.lock(self._file):
                raise UserError(
                    f"{path}: another process is writing this journal. Wait for it to end, or "
                    "use a new run directory (`--run DIR`)."
                )
            with path.open("rb") as lines:
                for record, size in _walk(lines, path):
                    self._take(record, size)
            if self._size < path.stat().st_size:
                fs.truncate(path, self._size)
            if is_new:
                fs.sync(self._file)
                fs.sync_dir(path.parent)
        except BaseException:
            self._file.close()
            raise
        self._broken = False

    @property
    def records(self) -> tuple[dict[str, Any], ...]:
        """All durable records in order, `v` and `seq` among their keys."""
        return tuple(self._records)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record of JSON values; returns once it is durable. Raises as `extend`."""
        self.extend((record,))

    def extend(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records of JSON values; returns once they are durable, which costs no more than one.

        Raises IntegrityError where another file stands under the journal's name, or none: it was
        removed, and the folder may be another command's by now. Raises OSError where the disk
        refuses; the journal is then as it was before, or, where not even that can be had, refuses
        further records with IntegrityError.
        """
        if self._broken:
            raise IntegrityError(
                f"{self.path}: an earlier write failed half-way. Run again: opening the journal "
                "cuts the torn record."
            )
        if not self._fs.is_at(self._file, self.path):
            raise IntegrityError(
                f"{self.path}: removed or replaced while this command ran; another may be at work "
                "there by now. Stopped: nothing more is written there."
            )
        numbered = [
            {"v": FORMAT_VERSION, "seq": seq, **record}
            for seq, record in enumerate(records, start=self._count)
        ]
        lines = list(map(_encode, numbered))
        if not lines:
            return
        try:
            self._fs.write(self._file, b"".join(lines))
            self._fs.sync(self._file)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(self.path)
            # A later record behind half a line would read as damage.
            self._broken = True
            self._fs.truncate(self.path, self._size)
            self._broken = False
            raise
        for record, line in zip(numbered, lines, strict=True):
            self._take(record, len(line))

    def _take(self, record: dict[str, Any], size: int) -> None:
        if self._on_record is None:
            self._records.append(record)
        else:
            self._on_record(record, self._size)
        self._count += 1
        self._size += size

    def close(self) -> None:
        """Let another process have the journal."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Folded:
    """What a journal's bytes say."""

    records: tuple[dict[str, Any], ...]
    size: int
    """Bytes of the good records; what follows is a torn tail."""


def fold(data: bytes, path: Path) -> Folded:
    """Read a journal's bytes; `path` names it in errors. Changes nothing.

    Raises JournalDamaged where a bad record is followed by a good one, and where the numbering
    of good records has a gap (a line was lost, or two processes wrote). Raises IntegrityError
    for a record of another format version.
    """
    found = list(_walk(io.BytesIO(data), path))
    return Folded(tuple(record for record, _ in found), sum(size for _, size in found))


def record_at(file: BinaryIO, offset: int) -> dict[str, Any] | None:
    """The record whose line begins there; None where the line is not as it was written."""
    file.seek(offset)
    return _decode(file.readline())


def _walk(lines: BinaryIO, path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The good records from the beginning, with the sizes of their lines. Raises as `fold`."""
    count = 0
    first_bad: int | None = None
    for number, line in enumerate(lines, start=1):
        record = _decode(line)
        if record is None:
            first_bad = first_bad or number
            continue
        if first_bad is not None:
            raise _damaged(path, first_bad, "is unreadable, and good records follow it")
        if record.get("v") != FORMAT_VERSION:
            raise IntegrityError(
                f"{path}, line {number}: format version {record.get('v')!r}, this Paceline reads "
                f"{FORMAT_VERSION}. Use the version that wrote it, or a new run directory."
            )
        if record.get("seq") != count:
            raise _damaged(path, number, f"has number {record.get('seq')}, not {count}")
        count += 1
        yield record, len(line)


def salvage(data: bytes) -> tuple[dict[str, Any], ...]:
    """The good records of a damaged journal: what a line says is true, but lines may be missing."""
    lines = (_decode(line) for line in io.BytesIO(data))
    return tuple(r for r in lines if r is not None and r.get("v") == FORMAT_VERSION)


def journal_bytes(records: Iterable[dict[str, Any]]) -> bytes:
    """The bytes of a new journal of these records, numbered anew."""
    return b"".join(
        _encode({**record, "v": FORMAT_VERSION, "seq": seq}) for seq, record in enumerate(records)
    )


def _damaged(path: Path, line: int, what: str) -> JournalDamaged:
    return JournalDamaged(f"{path}, line {line} {what}: the file was damaged after it was written.")


def _encode(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _decode(line: bytes) -> dict[str, Any] | None:
    crc, space, body = line[:_CRC_DIGITS], line[_CRC_DIGITS:][:1], line[_CRC_DIGITS + 1 : -1]
    if line[-1:] != b"\n" or space != b" " or crc != b"%08x" % zlib.crc32(body):
        return None
    try:
        record = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return record if isinstance(record, dict) else None
