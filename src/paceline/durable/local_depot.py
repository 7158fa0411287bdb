"""A depot without staging: workers write units where they stay."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from paceline.durable.depot import DepotMeters, Failed, Judge, Verified, first_words
from paceline.durable.errors import IntegrityError, no_room
from paceline.durable.fs import PARTIAL, REAL_FS, FileSystem, partial_of, settle
from paceline.durable.journal import Journal
from paceline.durable.room import Room, Users
from paceline.durable.space import Space, read_space
from paceline.durable.stalls import Stalls, Wait, other_advice, space_advice
from paceline.durable.store import LocalStore, Stat
from paceline.durable.unit_records import UnitRecords

_NOTABLE = 0.01
"""Share of the time from which on a stall is worth a word."""


class LocalDepot:
    """Units in a folder, written by the workers where they stay (`write_verified`).

    With a `judge` others write there too: a worker writes under a name that is this process's
    alone, and the unit gets its own unless one that the judge knows for it stands there by then.
    `tell` gets a sentence about the first of those.

    Nothing of ours goes away there by itself, so no mark is waited for: a unit is admitted as long
    as the free bytes hold it.
    `samples` gives the number of samples of a unit, for its record. See `Depot`.
    """

    def __init__(
        self,
        store: LocalStore,
        journal: Journal,
        fingerprint: str,
        *,
        samples: Callable[[str], int],
        judge: Judge | None = None,
        tell: Callable[[str], None] = lambda _: None,
        space_wait: float = 3600.0,
        fs: FileSystem = REAL_FS,
        read: Callable[[Path], Space] = read_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._judge = judge
        self._tell = tell
        self._others_first = 0
        self._fs = fs
        self._space_wait = space_wait
        self._stalls = Stalls(clock=clock)
        self._records = UnitRecords(journal, fingerprint, samples, self._stalls, clock=clock)
        self._room = Room(store.path("unit").parent, keeps_spare=True, read=read, clock=clock)
        self._users = Users(self._room.path)
        self._admitted: dict[str, int] = {}
        self._unplaced: dict[str, Stat] = {}
        self._nameless: str | None = None
        self._unrecorded: dict[str, Stat] = {}
        self._ended: list[Verified | Failed] = []

    @property
    def recovered(self) -> Mapping[str, Stat]:
        """None: what was made is where it stays."""
        return {}

    @property
    def pending(self) -> int:
        """See `Depot.pending`."""
        return len(self._unplaced) + len(self._unrecorded) + len(self._ended)

    @property
    def waiting(self) -> Wait | None:
        """See `Depot.waiting`."""
        return self._stalls.waiting

    def place(self, key: str) -> Path:
        """See `Depot.place`."""
        path = self._store.path(key)
        # Not the name under which this process itself would write to the unit's.
        return path if self._judge is None else partial_of(path.with_name(f"{path.name}.made"))

    def admit(self, key: str, num_bytes: int) -> Wait | None:
        """See `Depot.admit`."""
        if self._records.stuck is not None:
            return self._stalls.wait("journal", self._records.stuck)
        if self._nameless is not None:
            return self._stalls.wait("space", self._nameless)
        why = self._room.why_not(num_bytes, sum(self._admitted.values()))
        if why is not None:
            whose = self._users.words()
            words = f"{why}{f'; {whose}' if whose else ''}"
            return self._stalls.wait("space", f"{words}. Make room there.")
        self._admitted[key] = num_bytes
        if not self._room.was_refused:
            self._stalls.over()
        return None

    def made(self, key: str, stat: Stat) -> None:
        """See `Depot.made`."""
        self._admitted.pop(key, None)
        path = self.place(key)
        size = path.stat().st_size if path.is_file() else None
        if size != stat.size:
            self._ended.append(Failed(key, not_as_made(path, size, stat)))
            return
        if self._room.was_refused:
            self._stalls.over()
        self._room.took()
        if self._judge is None:
            self._record(key, stat)
        else:
            self._unplaced[key] = stat
            self._put_in_place(self._judge)

    def abandon(self, key: str) -> None:
        """See `Depot.abandon`; what stands under the unit's name is whole, and is left."""
        self._admitted.pop(key, None)
        path = self.place(key)
        if self._judge is not None:
            self._fs.unlink(path)
        for partial in sorted(path.parent.glob(f"{path.name}.*{PARTIAL}")):
            self._fs.unlink(partial)

    def refused(self, key: str, error: OSError) -> None:
        """See `Depot.refused`."""
        self._room.refused(error)
        self.abandon(key)

    def poll(self) -> list[Verified | Failed]:
        """See `Depot.poll`."""
        if self._judge is not None:
            self._put_in_place(self._judge)
        self._records.flush()
        ended, self._ended = self._ended, []
        return ended

    def overdue(self) -> str | None:
        """See `Depot.overdue`."""
        return self._stalls.given_up() if self._stalls.lasted() > self._space_wait else None

    def meters(self) -> DepotMeters:
        """See `Depot.meters`."""
        return DepotMeters(
            staging_bytes=0,
            staging_limit=0,
            backlog_units=self.pending,
            backlog_bytes=sum(
                stat.size
                for waiting in (self._unplaced, self._unrecorded)
                for stat in waiting.values()
            ),
            in_flight=0,
            uploaded_bytes=0,
            upload_cpu_seconds=0.0,
            stall_seconds=self._stalls.seconds,
            waiting=self._stalls.waiting,
            retries=0,
            last_error=None,
            others_first=self._others_first,
        )

    def suggest(self, seconds: float) -> list[str]:
        """See `Depot.suggest`."""
        return [
            space_advice(self._room.path, stalled, seconds, None)
            if kind == "space"
            else other_advice(kind, stalled, seconds)
            for kind, stalled in self._stalls.seconds.items()
            if stalled > _NOTABLE * seconds
        ]

    def close(self) -> None:
        """See `Depot.close`."""
        for key in self._unplaced:
            self._leave_out(key)

    def _put_in_place(self, judge: Judge) -> None:
        """Give units their names; those for which a folder has no room keep waiting for it."""
        for key, stat in list(self._unplaced.items()):
            try:
                found = self._first(key, stat, judge)
            except OSError as error:
                if no_room(error) is not None:
                    self._nameless = f"{self._store.path(key)}: {error.strerror}. Make room there."
                    self._stalls.wait("space", self._nameless)
                    return
                found = None
                self._leave_out(key)
                self._ended.append(Failed(key, error))
            if self._nameless is not None:
                self._nameless = None
                self._stalls.over()
            del self._unplaced[key]
            if found is not None:
                self._record(key, found)

    def _leave_out(self, key: str) -> None:
        with suppress(OSError):
            self._fs.unlink(self.place(key))

    def _first(self, key: str, stat: Stat, judge: Judge) -> Stat:
        """What stands under a unit's name from now on: the new one, or one that was before it."""
        made, path = self.place(key), self._store.path(key)
        if settle(made, path, fs=self._fs):
            return stat
        found = judge(key, path.stat().st_size)
        if found is None:
            self._fs.replace(made, path)
            self._fs.sync_dir(path.parent)
            return stat
        self._fs.unlink(made)
        self._others_first += 1
        if self._others_first == 1:
            self._tell(first_words(self._store.url, key))
        return found

    def _record(self, key: str, stat: Stat) -> None:
        self._unrecorded[key] = stat
        self._records.add("verified", key, stat, lambda: self._recorded(key))

    def _recorded(self, key: str) -> None:
        self._ended.append(Verified(key, self._unrecorded.pop(key)))
        self._stalls.progress()


def not_as_made(path: Path, size: int | None, stat: Stat) -> IntegrityError:
    """What a file is that is not the one a worker told of."""
    found = "gone" if size is None else f"{size} bytes"
    return IntegrityError(f"{path}: {found}, and its worker wrote {stat.size} bytes")
