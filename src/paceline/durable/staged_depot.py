"""A depot before an object store: units wait in staging until the store has proven them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.durable.amounts import shards_text, span_text
from paceline.durable.budget import Budget
from paceline.durable.depot import DepotMeters, Failed, Verified, first_words
from paceline.durable.errors import StoreFailed
from paceline.durable.journal import Journal
from paceline.durable.local_depot import not_as_made
from paceline.durable.room import Room, Users
from paceline.durable.space import Space, read_space
from paceline.durable.staging import Staging
from paceline.durable.stalls import Stalls, Wait, budget_advice, other_advice, space_advice
from paceline.durable.store import Stat, Store
from paceline.durable.unit_records import UnitRecords, staged_units
from paceline.durable.uploader import Uploaded, Uploader, UploadFailed

_NOTABLE = 0.01
"""Share of the time from which on a stall is worth a word."""

_HUNG_AFTER = 1800.0

_LONG = 30.0
"""Seconds from which on an upload that has not ended is named."""


@dataclass
class _Area:
    """A staging folder and what is in it."""

    staging: Staging
    room: Room
    users: Users
    in_work: dict[str, int] = field(default_factory=dict)
    """Admitted and not made: most bytes by key."""

    waiting: dict[str, Stat] = field(default_factory=dict)
    """Made and not verified."""

    @property
    def is_drained(self) -> bool:
        return not self.in_work and not self.waiting


class StagedDepot:
    """Units in `staging`, or in `fallback` while others fill that, until they are uploaded.

    Opening submits again what an earlier process had staged, and removes what proves nothing;
    `tell` gets a sentence about either. `samples` gives the number of samples of a unit, for its
    record. `hung_after` seconds without an end of an upload under way count as no answer, where
    `space_wait` is less. See `Depot`.
    """

    def __init__(
        self,
        store: Store,
        staging: Staging,
        journal: Journal,
        fingerprint: str,
        budget: Budget,
        uploader: Uploader,
        *,
        samples: Callable[[str], int],
        fallback: Staging | None = None,
        high: float = 0.8,
        low: float = 0.7,
        space_wait: float = 3600.0,
        hung_after: float = _HUNG_AFTER,
        tell: Callable[[str], None] = lambda _: None,
        read: Callable[[Path], Space] = read_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uploader = uploader
        self._budget = budget
        self._url = store.url
        self._space_wait = space_wait
        self._hung_after = max(hung_after, space_wait)
        self._tell = tell
        self._clock = clock
        self._stalls = Stalls(clock=clock)
        self._records = UnitRecords(journal, fingerprint, samples, self._stalls, clock=clock)
        self._areas = [
            _Area(s, Room(s.root, high, low, read=read, clock=clock), Users(s.root))
            for s in (staging, fallback)
            if s is not None
        ]
        self._area = self._areas[0]
        self._submitted_at = self._asked_at = clock()
        self._refusal: str | None = None
        self._told_of: float | None = None
        self._undeleted: dict[str, tuple[_Area, str]] = {}
        self._ended: list[Verified | Failed] = []
        self._recovered: dict[str, Stat] = {}
        self._others_first = 0
        self._recover(staged_units(journal.records, fingerprint))

    @property
    def recovered(self) -> Mapping[str, Stat]:
        """See `Depot.recovered`."""
        return dict(self._recovered)

    @property
    def pending(self) -> int:
        """See `Depot.pending`."""
        return sum(len(area.waiting) for area in self._areas) + len(self._ended)

    @property
    def waiting(self) -> Wait | None:
        """See `Depot.waiting`."""
        return self._stalls.waiting

    def place(self, key: str) -> Path:
        """See `Depot.place`."""
        return self._area_of(key).staging.path(key)

    def admit(self, key: str, num_bytes: int) -> Wait | None:
        """See `Depot.admit`."""
        self._asked_at = self._clock()
        if self._refusal is not None:
            return self._stalls.wait("store", self._refusal)
        if self._records.stuck is not None:
            return self._stalls.wait("journal", self._records.stuck)
        if key in self._undeleted:
            return self._stalls.wait("space", f"{self._undeleted[key][1]}: it cannot be removed")
        area = self._area_for(num_bytes)
        if isinstance(area, str):
            return self._stalls.wait("space", area)
        if not self._budget.try_reserve(key, num_bytes):
            return self._full()
        if area is not self._area:
            self._tell(f"Shards are staged in {area.staging.root} from now on.")
            self._area = area
        area.in_work[key] = num_bytes
        if not area.room.was_refused:
            self._stalls.over()
        return None

    def made(self, key: str, stat: Stat) -> None:
        """See `Depot.made`. Raises ValueError for a unit above what was admitted."""
        area = self._area_of(key)
        path = area.staging.path(key)
        size = path.stat().st_size if path.is_file() else None
        if size != stat.size:
            self.abandon(key)
            self._ended.append(Failed(key, not_as_made(path, size, stat)))
            return
        self._budget.settle(key, stat.size)
        if area.room.was_refused:
            self._stalls.over()
        area.room.took()
        del area.in_work[key]
        area.waiting[key] = stat
        self._records.add("staged", key, stat, lambda: self._submit(key, path, stat))

    def abandon(self, key: str) -> None:
        """See `Depot.abandon`."""
        area = self._area_of(key)
        del area.in_work[key]
        self._discard(key, area)

    def refused(self, key: str, error: OSError) -> None:
        """See `Depot.refused`."""
        self._area_of(key).room.refused(error)
        self.abandon(key)

    def poll(self) -> list[Verified | Failed]:
        """See `Depot.poll`."""
        for key, (area, _) in list(self._undeleted.items()):
            self._discard(key, area)
        for end in self._uploader.poll():
            if isinstance(end, Uploaded):
                self._uploaded(end)
            else:
                self._upload_failed(end)
        self._records.flush()
        self._mind_the_store()
        ended, self._ended = self._ended, []
        return ended

    def overdue(self) -> str | None:
        """See `Depot.overdue`."""
        if self._refusal is not None:
            return self._refusal
        waiting = self._stalls.waiting
        # Staging that is full while uploads end is the normal course of things.
        limit = self._hung_after if waiting and waiting.kind == "budget" else self._space_wait
        if waiting and self._stalls.lasted() > limit:
            return self._stalls.given_up()
        longest = self._uploader.longest()
        quiet = self._clock() - max(self._stalls.last_progress, self._submitted_at)
        if longest and quiet > self._hung_after:
            return f"{self._url}: {longest[0]} has been on its way for {span_text(longest[1])}"
        return None

    def meters(self) -> DepotMeters:
        """See `Depot.meters`."""
        return DepotMeters(
            staging_bytes=self._budget.held,
            staging_limit=self._budget.limit,
            backlog_units=sum(len(area.waiting) for area in self._areas),
            backlog_bytes=sum(s.size for area in self._areas for s in area.waiting.values()),
            in_flight=self._uploader.in_flight,
            uploaded_bytes=self._uploader.bytes_done,
            upload_cpu_seconds=self._uploader.cpu_seconds,
            stall_seconds=self._stalls.seconds,
            waiting=self._stalls.waiting,
            retries=self._uploader.retries,
            last_error=self._uploader.last_error,
            others_first=self._others_first,
        )

    def suggest(self, seconds: float) -> list[str]:
        """See `Depot.suggest`."""
        advice = []
        for kind, stalled in self._stalls.seconds.items():
            if stalled <= _NOTABLE * seconds:
                continue
            if kind == "budget":
                idle = self._stalls.idle_seconds
                advice.append(budget_advice(stalled, seconds, idle, self._uploader.concurrency))
            elif kind == "space":
                room = self._areas[0].room
                advice.append(space_advice(room.path, stalled, seconds, room.better_mark()))
            else:
                advice.append(other_advice(kind, stalled, seconds))
        return advice

    def close(self) -> None:
        """See `Depot.close`."""
        self._uploader.close()
        for area in self._areas:
            area.staging.close()

    def _recover(self, staged: dict[str, Stat]) -> None:
        for area in self._areas:
            left = {key: stat for key, stat in staged.items() if key not in self._recovered}
            found = area.staging.recover(left)
            for key, stat in found.kept.items():
                self._budget.adopt(key, stat.size)
                area.waiting[key] = stat
                self._submit(key, area.staging.path(key), stat, may_be_there=True)
            self._recovered |= found.kept
            root = area.staging.root
            if found.kept:
                self._tell(
                    f"{root}: {shards_text(len(found.kept))} of an earlier start "
                    f"{'is' if len(found.kept) == 1 else 'are'} whole: uploaded, not made again."
                )
            for name, reason in found.removed.items():
                self._tell(f"{root}: removed {name}: {reason}.")

    def _submit(self, key: str, path: Path, stat: Stat, *, may_be_there: bool = False) -> None:
        self._submitted_at = self._clock()
        self._uploader.submit(key, path, stat, may_be_there=may_be_there)

    def _uploaded(self, end: Uploaded) -> None:
        if end.was_there:
            self._others_first += 1
            if self._others_first == 1:
                self._tell(first_words(self._url, end.key))
        self._records.add("verified", end.key, end.stat, lambda: self._verified(end))

    def _verified(self, end: Uploaded) -> None:
        area = self._area_of(end.key)
        del area.waiting[end.key]
        self._ended.append(Verified(end.key, end.stat))
        self._stalls.progress()
        self._discard(end.key, area)

    def _upload_failed(self, end: UploadFailed) -> None:
        area = self._area_of(end.key)
        del area.waiting[end.key]
        if isinstance(end.error, StoreFailed | OSError):
            # The file is whole and recorded as staged: it keeps its bytes, the next start has it.
            self._refusal = self._refusal or (
                f"{end.error} {shards_text(self.pending)} in staging: the same command goes on "
                "with what is there."
            )
        else:
            self._discard(end.key, area)
        self._ended.append(Failed(end.key, end.error))

    def _discard(self, key: str, area: _Area) -> None:
        """Remove a file and let its bytes go; what cannot be removed keeps them."""
        try:
            area.staging.discard(key)
        except OSError as error:
            self._undeleted[key] = (area, f"{area.staging.path(key)}: {error.strerror}")
            return
        self._undeleted.pop(key, None)
        self._budget.release(key)

    def _area_of(self, key: str) -> _Area:
        for area in self._areas:
            if key in area.in_work or key in area.waiting:
                return area
        raise KeyError(f"{key} was not admitted")

    def _area_for(self, num_bytes: int) -> _Area | str:
        """Where a unit may be staged, or why nowhere now."""
        reasons = []
        for area in self._areas:
            in_work = sum(area.in_work.values())
            why = area.room.why_not(num_bytes, in_work, is_drained=area.is_drained)
            if why is None:
                return area
            if not area.is_drained:
                return why
            whose = area.users.words()
            reasons.append(f"{why}. Nothing of this run lies there" + (f"; {whose}" * bool(whose)))
        reason = "; ".join(reasons) + ". Make room, or choose another `extract.staging`."
        self._tell_whose(reason)
        return reason

    def _mind_the_store(self) -> None:
        """Wait for a store that fails also where nobody asks for room any more."""
        waiting, error = self._stalls.waiting, self._uploader.last_error
        if error is None:
            if waiting is not None and waiting.kind == "store" and self._refusal is None:
                self._stalls.over()
            return
        last = max(self._stalls.last_progress, self._submitted_at, self._asked_at)
        is_idle = waiting is None or waiting.kind == "budget"
        if is_idle and self._clock() - last >= _LONG:
            self._wait_for_store(error)

    def _wait_for_store(self, error: str) -> Wait:
        return self._stalls.wait("store", f"{error}; {shards_text(self.pending)} in staging")

    def _tell_whose(self, reason: str) -> None:
        """Say it once a wait, as soon as it is known: counting takes longer than `admit` may."""
        waiting = self._stalls.waiting
        if waiting is None:
            self._told_of = None
        elif self._told_of != waiting.since and any(a.users.words() for a in self._areas):
            self._told_of = waiting.since
            self._tell(reason)

    def _full(self) -> Wait:
        budget, error = self._budget, self._uploader.last_error
        if error is not None:
            return self._wait_for_store(error)
        if self._undeleted:
            _, why = next(iter(self._undeleted.values()))
            return self._stalls.wait("space", f"{why}: a stored shard cannot be removed")
        is_idle = self._uploader.in_flight < self._uploader.concurrency
        reason = (
            f"{self._area.staging.root}: {budget.held:,} of {budget.limit:,} bytes are taken; "
            f"{shards_text(self.pending)} on their way to {self._url}"
        )
        longest = self._uploader.longest()
        if longest is not None and longest[1] >= _LONG:
            reason += f", {longest[0]} for {span_text(longest[1])} now"
        return self._stalls.wait("budget", reason, is_idle=is_idle)
