"""The last events of a file, read from its end: a file of a long training is hundreds of MB."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.watch.events import SCHEMA_VERSION, Counts

LIMIT = 4 << 20
"""Bytes from the end that are looked at."""

_BLOCK = 64 << 10

_LATEST = 1e11
"""Seconds since the epoch; no calendar reaches a damaged number beyond."""


def last_events(path: Path, *, limit: int = LIMIT, block: int = _BLOCK) -> Iterator[dict[str, Any]]:
    """The events of a file, newest first, as far as the last `limit` bytes hold them.

    Every one has `kind` (text), `t` (a number), `pid` (an integer) and `v` (an integer, which may
    be a newer SCHEMA_VERSION). Lines that are torn, damaged or no events are passed over. Raises
    OSError where the file cannot be read.
    """
    decoder = msgspec.json.Decoder()
    for line in _lines(path, limit, block):
        try:
            event = decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        if _is_event(event):
            yield event


def counts_of(event: dict[str, Any]) -> Counts | None:
    """The counts that an event carries; None where it has none, or is of another schema."""
    if event["v"] != SCHEMA_VERSION or "unit" not in event or "done" not in event:
        return None
    try:
        return msgspec.convert(event, Counts)
    except msgspec.ValidationError:
        return None


def _lines(path: Path, limit: int, block: int) -> Iterator[bytes]:
    """Lines from the end; the first of the file, or of what `limit` cuts off, may be a part."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        floor = max(0, position - limit)
        pieces: list[bytes] = []
        while position > floor:
            start = max(floor, position - block)
            file.seek(start)
            data = file.read(position - start)
            position = start
            first, *rest = data.split(b"\n")
            if not rest:
                pieces.append(data)
                continue
            # The pieces of the line that began in this block, newest first.
            yield b"".join([rest.pop(), *reversed(pieces)])
            yield from reversed(rest)
            pieces = [first]
        yield b"".join(reversed(pieces))


def _is_event(event: object) -> bool:
    return (
        isinstance(event, dict)
        and isinstance(event.get("kind"), str)
        and type(event.get("t")) in (int, float)
        and 0 <= event["t"] < _LATEST
        and type(event.get("pid")) is int
        and type(event.get("v")) is int
    )
