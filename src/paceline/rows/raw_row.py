"""A row as it stands in a file, before anybody has looked at what it says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.rows.rejection import RowRejected

MAX_ROW_BYTES = 64 << 20
"""A longer one is no conversation; it is rejected without being held in memory."""

TORN = "torn_file"
"""The reason of the row that stands for all that a file has lost at its end."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row, where it stands, and what is wrong with it."""

    file: Path
    line: int
    """1-based: the line of a file of lines, the element of a JSON array, the row of a table."""
    raw: bytes
    """Its bytes; the first `MAX_ROW_BYTES` of a longer one, JSON of a table's row."""
    value: dict[str, Any] | None
    """The decoded object, or None where `fault` says why there is none or the line is blank."""
    fault: RowRejected | None = None

    @property
    def is_blank(self) -> bool:
        """An empty line: counted, and nothing else."""
        return self.value is None and self.fault is None


def decode_row(file: Path, line: int, raw: bytes) -> RawRow:
    """A row of JSON without white space around it; blank where nothing is left."""
    if not raw:
        return RawRow(file, line, raw, None)
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return bad_row(file, line, raw, "bad_utf8", f"byte {error.start}: {error.reason}")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return bad_row(file, line, raw, "bad_json", str(error))
    if not isinstance(value, dict):
        kind = type(value).__name__
        return bad_row(file, line, raw, "not_an_object", _not_an_object(kind))
    return RawRow(file, line, raw, value)


def bad_row(file: Path, line: int, raw: bytes, reason: str, detail: str) -> RawRow:
    """A row that cannot be used, with the reason code and what is wrong in words."""
    return RawRow(file, line, raw[:MAX_ROW_BYTES], None, RowRejected(reason, detail))


def torn_row(file: Path, line: int, raw: bytes, detail: str) -> RawRow:
    """What stands for all that a file has lost at its end."""
    return bad_row(file, line, raw, "torn_file", detail)


def too_long(file: Path, line: int, raw: bytes) -> RawRow:
    """A row of more than `MAX_ROW_BYTES`."""
    return bad_row(file, line, raw, "line_too_long", f"more than {MAX_ROW_BYTES >> 20} MiB")


def _not_an_object(kind: str) -> str:
    hint = "; a file that is one JSON array has to end in .json" if kind == "list" else ""
    return f"the row is a {kind}{hint}"
