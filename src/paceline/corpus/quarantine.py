"""`quarantine.jsonl`: every row that was left out, with where it stands and why."""

from typing import BinaryIO

import msgspec

from paceline.corpus.rows import Rejected
from paceline.durable.fs import REAL_FS
from paceline.rows.raw_row import RawRow

MAX_RAW_BYTES = 4096
"""A row is quoted up to here; file and line lead to the rest."""


class Quarantine:
    """Writes rejected rows to an open file, one JSON line each."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, source: str, row: RawRow, rejected: Rejected) -> None:
        """Record one row; bytes that are no text are quoted in hexadecimal."""
        record = {
            "source": source,
            "file": str(row.file),
            "line": row.line,
            "reason": rejected.reason,
            "detail": rejected.detail,
            "sample_id": rejected.sample_id,
            "prompt_id": rejected.prompt_id,
            "raw": row.raw[:MAX_RAW_BYTES].decode(errors="backslashreplace"),
            "raw_bytes": len(row.raw),
        }
        REAL_FS.write(self._file, msgspec.json.encode(record) + b"\n")
