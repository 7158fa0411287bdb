"""The journal: an append-only record of what is done, and the truth after any crash.

One line per record, `crc32hex SP json LF`. The checksum covers the JSON; the JSON holds `v` (the
format's version), `seq` (0, 1, 2, ...) and the record's own keys.
"""

import io
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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

    def __init__(self, path: Path, *, fs: FileSystem = REAL_FS) -> None:
        self.path = path
        self._fs = fs
        fs.make_dirs(path.parent)
        is_new = not path.exists()
        self._file = fs.open_append(path)
        try:
            if not fs.lock(self._file):
                raise UserError(
                    f"{path}: another process is writing this journal. Wait for it to end, or "
                    "use a new run directory (`--run DIR`)."
                )
            data = path.read_bytes()
            folded = fold(data, path)
            if folded.size < len(data):
                fs.truncate(path, folded.size)
            if is_new:
                fs.sync(self._file)
                fs.sync_dir(path.parent)
        except BaseException:
            self._file.close()
            raise
        self._records = list(folded.records)
        self._size = folded.size
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
            for seq, record in enumerate(records, start=len(self._records))
        ]
        lines = b"".join(map(_encode, numbered))
        if not lines:
            return
        try:
            self._fs.write(self._file, lines)
            self._fs.sync(self._file)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(self.path)
            # A later record behind half a line would read as damage.
            self._broken = True
            self._fs.truncate(self.path, self._size)
            self._broken = False
            raise
        self._size += len(lines)
        self._records.extend(numbered)

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
    records: list[dict[str, Any]] = []
    size = 0
    first_bad: int | None = None
    for number, line in enumerate(io.BytesIO(data), start=1):
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
        if record.get("seq") != len(records):
            raise _damaged(path, number, f"has number {record.get('seq')}, not {len(records)}")
        records.append(record)
        size += len(line)
    return Folded(tuple(records), size)


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
