"""Rows out of files: JSON Lines in a stream, JSON arrays whole; a bad row never ends a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.corpus.rejection import RowRejected
from paceline.durable.errors import DataError

MAX_LINE_BYTES = 64 << 20
"""A longer line is no conversation; it is rejected without being held in memory."""

_BOM = b"\xef\xbb\xbf"
_LINE_SUFFIXES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINE_SUFFIXES, ".json")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in the file."""

    line: int
    """1-based: the line of a JSONL file, the element of a JSON array."""
    raw: bytes
    """Its bytes; the first `MAX_LINE_BYTES` of a longer line."""
    value: dict[str, Any] | None
    """The decoded object, or None where `fault` says why there is none or the line is blank."""
    fault: RowRejected | None = None

    @property
    def is_blank(self) -> bool:
        """An empty line: counted, and nothing else."""
        return self.value is None and self.fault is None


def check_source(path: Path) -> None:
    """Refuse a source that is missing or of a form nobody can read. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check corpus.sources in the recipe.")
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path}: unknown form {path.suffix!r}. Sources are .jsonl files or .json arrays "
            "(unpack or convert this one)."
        )


def read_rows(path: Path, limit: int | None = None) -> Iterator[RawRow]:
    """Stream a file's rows in order, at most `limit` of them; blank lines count as none.

    Raises DataError where the file as a whole has no rows to tell apart.
    """
    check_source(path)
    rows = _array_rows(path) if _is_array(path) else _line_rows(path)
    taken = 0
    for row in rows:
        if not row.is_blank:
            if limit is not None and taken >= limit:
                return
            taken += 1
        yield row


def _is_array(path: Path) -> bool:
    """Whether a `.json` file holds an array; many that are called so hold JSON Lines."""
    if path.suffix.lower() in _LINE_SUFFIXES:
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    return head.removeprefix(_BOM).lstrip().startswith(b"[")


def _line_rows(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE_BYTES)
                fault = RowRejected("line_too_long", f"more than {MAX_LINE_BYTES >> 20} MiB")
                yield RawRow(number, line[:MAX_LINE_BYTES], None, fault)
                continue
            if number == 1:
                line = line.removeprefix(_BOM)
            yield _decode(number, line.strip())


def _array_rows(path: Path) -> Iterator[RawRow]:
    data = path.read_bytes().removeprefix(_BOM)
    try:
        elements = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DataError(
            f"{path}: not a JSON array ({error}). One damaged spot spoils an array as a whole: "
            "repair it, or give the rows as .jsonl, where a bad line is only a bad line."
        ) from error
    for number, element in enumerate(elements, start=1):
        yield _decode(number, bytes(element))


def _decode(number: int, raw: bytes) -> RawRow:
    if not raw:
        return RawRow(number, raw, None)
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fault = RowRejected("bad_utf8", f"byte {error.start}: {error.reason}")
        return RawRow(number, raw, None, fault)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return RawRow(number, raw, None, RowRejected("bad_json", str(error)))
    if not isinstance(value, dict):
        kind = type(value).__name__
        return RawRow(number, raw, None, RowRejected("not_an_object", _not_an_object(kind)))
    return RawRow(number, raw, value)


def _not_an_object(kind: str) -> str:
    hint = "; a file that is one JSON array has to end in .json" if kind == "list" else ""
    return f"the row is a {kind}{hint}"
