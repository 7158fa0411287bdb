"""Progress in tokens, the time that is left, and what the workers are at."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.durable.depot import DepotMeters
from paceline.durable.space import read_space
from paceline.features.plan import Unit
from paceline.flow.units import Snapshot, WorkerView
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import Speed, TokenProgress, seconds_text
from paceline.watch.words import counted, short_bytes

_LOG = logging.getLogger(__name__)

_ENOUGH = 3

_IN_A_ROW = 12
"""Units given up, none made in between, after which it is not the units either."""

_NOTABLE = 0.1
"""Share of the time without room from which on the time left is reckoned from what was stored."""

_AGAIN = "after a death or failure"
"""Why shards are redone that were not there yet."""

_EVERY = 5.0
"""Seconds between two events that tell of nothing finished."""


class Progress:
    """Counts units; tells events, and the terminal inside `shown`."""

    def __init__(
        self,
        events: EventWriter,
        units: Sequence[Unit],
        lengths: npt.NDArray[np.int32],
        *,
        skipped: set[int],
        redone: Mapping[str, int],
        workers: int,
        place: Path,
        part: str = "",
    ) -> None:
        """`skipped` are indices of units done by earlier runs; `workers` are to run side by side.

        `redone` counts shards by why what was there of them proved nothing.

        `place` is the folder that shards are written to; its free bytes are told. `part` is what
        `--shard` was given, if anything.
        """
        self._events = events
        ends = np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64))))
        self._tokens = {u.index: int(ends[u.stop] - ends[u.start]) for u in units}
        self._samples = {u.index: u.stop - u.start for u in units}
        self._workers = workers
        self._redone = redone
        self._place = place
        self._part = part
        self._timed_tokens = 0
        self._timed_samples = 0.0
        self._seconds = 0.0
        self._units_done = self._units_skipped = len(skipped)
        self._samples_done = self._samples_skipped = sum(self._samples[i] for i in skipped)
        self._tokens_done = self._tokens_before = sum(self._tokens[i] for i in skipped)
        self._all_samples, self._all_tokens = (
            sum(self._samples.values()),
            sum(self._tokens.values()),
        )
        self.failed_in_a_row = 0
        """Units given up by this process since one was verified."""
        self._set_aside: dict[str, int] = {}
        self._stuck: dict[tuple[int | None, str, str], dict[str, Any]] = {}
        self._snapshot: Snapshot | None = None
        self._free_bytes = self._free()
        self._told = 0.0
        self._began = time.monotonic()
        self._terminal = TokenProgress("extract", self._all_tokens, done=self._tokens_done)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all workers that are alive, without their warm-up; None before anything was timed."""
        if self._timed_tokens == 0 or self._seconds <= 0:
            return None
        return round(self._timed_tokens / self._seconds * self._workers, 1)

    @property
    def samples_per_s(self) -> float | None:
        """As `tokens_per_s`."""
        if self._timed_samples == 0 or self._seconds <= 0:
            return None
        return round(self._timed_samples / self._seconds * self._workers, 4)

    def counts(self) -> Counts:
        """For events."""
        return Counts(
            unit="samples",
            total=self._all_samples,
            done=self._samples_done,
            skipped=self._samples_skipped,
            redone=self._all_redone(),
            redone_unit="shards",
            failed=sum(self._set_aside.values()),
            quarantined=self._set_aside,
            tokens=self._tokens_done,
            tokens_total=self._all_tokens,
            rate=self.tokens_per_s,
            eta=self._eta(),
        )

    def more(self) -> dict[str, Any]:
        """What the events have beside the counts: shards, workers, uploads, room."""
        told: dict[str, Any] = {
            "units": len(self._samples),
            "units_done": self._units_done,
            "units_skipped": self._units_skipped,
            "samples_per_s": self.samples_per_s,
            "free_bytes": self._free_bytes,
            "part": self._part,
        }
        if self._snapshot is not None:
            told["workers"] = [_worker(view) for view in self._snapshot.workers]
            told["stuck"] = list(self._stuck.values())
            told |= _metered(self._snapshot.meters)
            sent, cpu_seconds, seconds = self.uploads()
            if sent and seconds > 0:
                told["upload_cpu_share"] = round(cpu_seconds / seconds, 4)
        return told

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it for as long as the block; one that ends early leaves its last line."""
        try:
            with self._terminal:
                yield
        except BaseException:
            _LOG.info("extract: %s", self.line())
            raise

    def line(self) -> str:
        """How it stands, in one line."""
        failed = sum(self._set_aside.values())
        new = self._samples_done - self._samples_skipped - failed
        parts = [f"skipped {self._samples_skipped:,} verified, {new:,} new"]
        parts.append(counted(failed, "error"))
        redone = sum(self._all_redone().values())
        if redone:
            parts.append(f"{counted(redone, 'shard')} redone")
        samples, tokens, eta, free = (
            self.samples_per_s,
            self.tokens_per_s,
            self._eta(),
            self._free_bytes,
        )
        if samples is not None and tokens is not None:
            parts += [f"{samples:,.2f} samples/s", f"{tokens:,.0f} tokens/s"]
        if eta:
            parts.append(f"{seconds_text(eta)} left")
        if free is not None:
            parts.append(f"{short_bytes(free)} free")
        return ", ".join(parts)

    def add(self, index: int, times: Any | None) -> None:
        """Count unit `index` as verified; `times` are those of its capture, None without one."""
        self._units_done += 1
        self.failed_in_a_row = 0
        self._samples_done += self._samples[index]
        self._tokens_done += self._tokens[index]
        if times is not None:
            self._timed_tokens += times.timed_tokens
            self._timed_samples += (
                self._samples[index] * times.timed_tokens / max(1, self._tokens[index])
            )
            self._seconds += times.seconds
        self._tell()

    @property
    def is_hopeless(self) -> bool:
        """Whether several units were given up and none was made: it is not the units.

        A disk that has become read-only would have every unit computed in vain.
        """
        enough = _IN_A_ROW if self._units_done else _ENOUGH
        return self.failed_in_a_row >= enough

    def set_aside(self, index: int, reason: str) -> None:
        """Count unit `index` as quarantined."""
        self.failed_in_a_row += 1
        self._samples_done += self._samples[index]
        self._tokens_done += self._tokens[index]
        self._set_aside[reason] = self._set_aside.get(reason, 0) + self._samples[index]
        self._tell()

    def hangs(self, fields: Mapping[str, Any]) -> None:
        """A call of a worker (of this process where None) has not returned for long."""
        key = (fields.get("worker"), str(fields.get("call")), str(fields.get("path")))
        self._stuck[key] = {
            "worker": key[0],
            "call": key[1],
            "path": key[2],
            "since": time.time() - float(fields.get("seconds", 0.0)),
            "process_state": str(fields.get("process_state", "")),
        }
        self._tell()

    def returned(self, fields: Mapping[str, Any]) -> None:
        """That call has returned, or its worker is no more."""
        self._stuck.pop((fields.get("worker"), str(fields.get("call")), str(fields.get("path"))), 0)
        self._tell()

    def uploads(self) -> tuple[int, float, float]:
        """Bytes uploaded, CPU seconds of the uploads, and seconds since the work began."""
        seconds = time.monotonic() - self._began
        if self._snapshot is None:
            return 0, 0.0, seconds
        meters = self._snapshot.meters
        return meters.uploaded_bytes, meters.upload_cpu_seconds, seconds

    def tick(self, snapshot: Snapshot) -> None:
        """Take in what workers and uploads are at; tell of it now and then."""
        was_waiting = self._snapshot is not None and self._snapshot.meters.waiting is not None
        self._snapshot = snapshot
        # Who has given up brings nothing any more. At the end, and while the last one is started
        # again, there is none: the rate stays what it was.
        alive = sum(view.pid is not None for view in snapshot.workers)
        self._workers = alive or self._workers
        has_changed = was_waiting is not (snapshot.meters.waiting is not None)
        if has_changed or time.monotonic() - self._told >= _EVERY:
            # Here alone: who tells of a call that hangs must not look at the place where it does.
            self._free_bytes = self._free()
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._events.emit("progress", self.counts(), **self.more())
        speed = Speed(self.tokens_per_s, self._eta())
        self._terminal.update(self._tokens_done, self._note(), speed=speed)

    def _all_redone(self) -> dict[str, int]:
        again = 0 if self._snapshot is None else self._snapshot.redone
        return {**self._redone, **({_AGAIN: again} if again else {})}

    def _note(self) -> str:
        for stuck in list(self._stuck.values()):
            who = "this process" if stuck["worker"] is None else f"worker {stuck['worker']}"
            seconds = seconds_text(time.time() - stuck["since"])
            return f"{who}: {stuck['call']} {stuck['path']} has not returned for {seconds}"
        if self._snapshot is None:
            return ""
        waiting = self._snapshot.meters.waiting
        if waiting is not None:
            return f"waiting: {waiting.reason}"
        backlog = self._snapshot.meters.backlog_units
        return f"{counted(backlog, 'shard')} on the way to the store" if backlog else ""

    def _eta(self) -> float | None:
        rate = self.tokens_per_s
        left = self._all_tokens - self._tokens_done
        if rate is None or rate <= 0:
            return None
        seconds = time.monotonic() - self._began
        stalls = {} if self._snapshot is None else self._snapshot.meters.stall_seconds
        made = self._tokens_done - self._tokens_before
        if made > 0 and sum(stalls.values()) > _NOTABLE * seconds:
            # What workers could do is not what staging and uploads let them do.
            rate = min(rate, made / seconds)
        return round(left / rate, 1)

    def _free(self) -> int | None:
        try:
            return read_space(self._place).free
        except OSError:
            return None


def _worker(view: WorkerView) -> dict[str, Any]:
    device = "" if view.device is None else f"GPU {view.device}"
    return {**asdict(view), "device": device}


def _metered(meters: DepotMeters) -> dict[str, Any]:
    waiting = meters.waiting
    return {
        "staging_bytes": meters.staging_bytes,
        "staging_limit": meters.staging_limit,
        "backlog_units": meters.backlog_units,
        "backlog_bytes": meters.backlog_bytes,
        "uploaded_bytes": meters.uploaded_bytes,
        "stall_seconds": {kind: round(s, 3) for kind, s in meters.stall_seconds.items()},
        "waiting": None
        if waiting is None
        else {"kind": waiting.kind, "reason": waiting.reason, "since": waiting.since},
    }
