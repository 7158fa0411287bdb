"""Where made units go: the contract between who makes them and who keeps them.

A unit is admitted, made by a worker under `place(key)`, and reported once it is verified where
it belongs. `LocalDepot` keeps it where it was made; `StagedDepot` uploads it. All calls come from
one thread, and none of them waits for room or for an upload.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.durable.stalls import Wait
from paceline.durable.store import Stat

Judge = Callable[[str, int], Stat | None]
"""Says what the object of a key, which has so many bytes, proves to be: the very unit of that key
with this size and checksum, or nothing. Where several processes make units for one store, the
first that stands is kept."""


@dataclass(frozen=True)
class Verified:
    """A unit that is whole at its place, and recorded durably as such."""

    key: str
    stat: Stat
    """Of what stands there: another process may have been first (`Judge`)."""


@dataclass(frozen=True)
class Failed:
    """A unit that was made and could not be kept.

    After an IntegrityError its bytes are gone and it is to be made again. After any other error
    of a store they wait in staging for the next start, and `Depot.overdue` says why.
    """

    key: str
    error: BaseException


@dataclass(frozen=True)
class DepotMeters:
    """How a depot stands."""

    staging_bytes: int
    """Bytes reserved or waiting in staging; 0 where nothing is staged."""

    staging_limit: int
    backlog_units: int
    """Units made and not verified."""

    backlog_bytes: int
    in_flight: int
    """Uploads under way."""

    uploaded_bytes: int
    upload_cpu_seconds: float
    stall_seconds: dict[str, float]
    """Seconds without room, by kind of wait."""

    waiting: Wait | None
    retries: int
    """Uploads that failed and were tried again."""

    last_error: str | None
    """Why an upload that is being tried again failed last."""

    others_first: int = 0
    """Units that were made, and that another process had put there before: theirs were kept."""


def first_words(url: str, key: str) -> str:
    """What is told of the first unit that another process had put there before."""
    return (
        f"{url}: {key} was there before this one was, made by another process of the same "
        "extraction. Whatever is first stands, and the others are left out; more of them are "
        "counted and not named."
    )


class Depot(Protocol):
    """Where made units go."""

    @property
    def recovered(self) -> Mapping[str, Stat]:
        """Units that an earlier process had made: on their way, to be reported by `poll`."""
        ...

    @property
    def pending(self) -> int:
        """Units made that `poll` has not reported."""
        ...

    @property
    def waiting(self) -> Wait | None:
        """What is waited for, if anything; that of `meters`, which costs more."""
        ...

    def place(self, key: str) -> Path:
        """Where the worker writes an admitted unit, durably and under this very name."""
        ...

    def admit(self, key: str, num_bytes: int) -> Wait | None:
        """Reserve room for a unit of at most `num_bytes`; why not now, or None where it is done.

        Raises ValueError for a unit that could never be admitted.
        """
        ...

    def made(self, key: str, stat: Stat) -> None:
        """Its worker has written the unit durably.

        Raises OSError where the journal cannot be written for other reasons than room.
        """
        ...

    def abandon(self, key: str) -> None:
        """Its worker failed or died: frees the room and removes what it had written."""
        ...

    def refused(self, key: str, error: OSError) -> None:
        """Its worker found no room (`errors.no_room`): as `abandon`, and others wait for room."""
        ...

    def poll(self) -> list[Verified | Failed]:
        """What became of units since the last call. Raises OSError as `made` does."""
        ...

    def overdue(self) -> str | None:
        """Why to give up: no room, or no answer, for too long; or a store that said no for good."""
        ...

    def meters(self) -> DepotMeters:
        """How it stands."""
        ...

    def suggest(self, seconds: float) -> list[str]:
        """What would have shortened the waits of the last `seconds`; empty where none matters."""
        ...

    def close(self) -> None:
        """Let go of what is held; uploads that have not ended are dropped, their files stay."""
        ...
