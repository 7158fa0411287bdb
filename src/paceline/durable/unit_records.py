"""What a depot writes into the journal: never before it is so, and again once there is room."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import no_room
from paceline.durable.journal import Journal
from paceline.durable.stalls import Stalls
from paceline.durable.store import Stat

STAGED = "staged"
VERIFIED = "verified"

_PAUSE = 1.0
"""Seconds between tries: each one syncs a file."""


@dataclass(frozen=True)
class _Record:
    fields: Mapping[str, Any]
    then: Callable[[], None]


class UnitRecords:
    """Appends records of units in order; what the disk has no room for waits."""

    def __init__(
        self,
        journal: Journal,
        fingerprint: str,
        samples: Callable[[str], int],
        stalls: Stalls,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._fingerprint = fingerprint
        self._samples = samples
        self._stalls = stalls
        self._clock = clock
        self._waiting: deque[_Record] = deque()
        self._again_at = 0.0
        self._stuck: str | None = None

    @property
    def stuck(self) -> str | None:
        """Why records wait; None where none does."""
        return self._stuck

    def add(
        self,
        kind: Literal["staged", "verified"],
        key: str,
        stat: Stat,
        then: Callable[[], None],
    ) -> None:
        """Append a record; `then` is called once it is durable. Raises OSError as `flush`."""
        fields = {
            "kind": kind,
            "key": key,
            "fingerprint": self._fingerprint,
            "samples": self._samples(key),
            "size": stat.size,
            "crc64": crc64_hex(stat.crc64),
        }
        self._waiting.append(_Record(fields, then))
        self.flush()

    def flush(self) -> None:
        """Append what waits, unless it was tried a moment ago.

        Raises OSError, other than for want of room, and IntegrityError as `Journal.append` does.
        """
        while self._waiting and (self._stuck is None or self._clock() >= self._again_at):
            try:
                self._journal.append(dict(self._waiting[0].fields))
            except OSError as error:
                if no_room(error) is None:
                    raise
                self._again_at = self._clock() + _PAUSE
                self._stuck = f"{self._journal.path}: {error.strerror}"
                self._stalls.wait("journal", self._stuck)
                return
            if self._stuck is not None:
                self._stuck = None
                self._stalls.over()
            self._waiting.popleft().then()


def staged_units(records: Iterable[Mapping[str, Any]], fingerprint: str) -> dict[str, Stat]:
    """Units of `fingerprint` whose last record says that they wait for their upload."""
    found: dict[str, Stat] = {}
    for record in records:
        if record["kind"] in (STAGED, VERIFIED) and record["fingerprint"] == fingerprint:
            found.pop(record["key"], None)
            if record["kind"] == STAGED:
                found[record["key"]] = Stat(record["size"], int(record["crc64"], 16))
    return found
