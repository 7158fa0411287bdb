"""Progress in tokens, and the time that is left."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from paceline.extract.worker import UnitDone
from paceline.features.plan import Unit
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress


class Progress:
    """Counts finished units; tells events and terminal, which shows it while it is entered."""

    def __init__(
        self,
        events: EventWriter,
        units: Sequence[Unit],
        lengths: Sequence[int],
        *,
        skipped: set[int],
        redone: Mapping[str, int],
        workers: int,
    ) -> None:
        """`skipped` are indices of units done by earlier runs; `workers` run side by side."""
        self.workers = workers
        self._events = events
        self._tokens = [sum(lengths[u.start : u.stop]) for u in units]
        self._samples = [u.stop - u.start for u in units]
        self._redone = redone
        self._timed_tokens = 0
        self._seconds = 0.0
        self._units_done = self._units_skipped = len(skipped)
        self._samples_done = self._samples_skipped = sum(self._samples[i] for i in skipped)
        self._tokens_done = sum(self._tokens[i] for i in skipped)
        self._all_samples, self._all_tokens = sum(self._samples), sum(self._tokens)
        self._terminal = TokenProgress("extract", self._all_tokens, done=self._tokens_done)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all workers together, without their warm-up; None before anything was timed."""
        if self._timed_tokens == 0 or self._seconds <= 0:
            return None
        return round(self._timed_tokens / self._seconds * self.workers, 1)

    def counts(self) -> Counts:
        """For events."""
        rate = self.tokens_per_s
        left = self._all_tokens - self._tokens_done
        return Counts(
            unit="samples",
            total=self._all_samples,
            done=self._samples_done,
            skipped=self._samples_skipped,
            redone=self._redone,
            tokens=self._tokens_done,
            tokens_total=self._all_tokens,
            rate=rate,
            eta=None if rate is None else round(left / rate, 1),
        )

    def more(self) -> dict[str, Any]:
        """What the events have beside the counts: how many shards."""
        return {
            "units": len(self._samples),
            "units_done": self._units_done,
            "units_skipped": self._units_skipped,
        }

    def add(self, index: int, result: UnitDone) -> None:
        """Count unit `index` and emit `progress`."""
        self._units_done += 1
        self._samples_done += self._samples[index]
        self._tokens_done += self._tokens[index]
        self._timed_tokens += result.timed_tokens
        self._seconds += result.seconds
        self._events.emit("progress", self.counts(), **self.more())
        self._terminal.update(self._tokens_done)

    def __enter__(self) -> Self:
        self._terminal.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._terminal.__exit__(kind, error, trace)
