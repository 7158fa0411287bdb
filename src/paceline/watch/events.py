"""Events: one JSON line each, one file per writer; the only thing that status and watch read."""

import os
import time
from pathlib import Path
from typing import Any, Self

import msgspec

SCHEMA_VERSION = 1


class EventWriter:
    """Appends events to a file of its own. An error here never stops the work."""

    def __init__(self, folder: Path, role: str) -> None:
        self.path = folder / f"{role}.jsonl"
        self._role = role
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        except OSError:
            self._file = None

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event and flush it; `fields` are JSON values."""
        if self._file is None:
            return
        event = {
            "v": SCHEMA_VERSION,
            "t": round(time.time(), 3),
            "pid": os.getpid(),
            "role": self._role,
            "kind": kind,
            **fields,
        }
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
            self._file.flush()
        except (OSError, TypeError):
            self._file = None

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
