"""Progress in tokens, and the time that is left."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from paceline.extract.worker import UnitDone
from paceline.features.plan import Unit
from paceline.watch.events import EventWriter
from paceline.watch.progress import TokenProgress


class Progress:
    """Counts finished units; tells events and terminal. `start` is emitted on entering."""

    def __init__(
        self,
        events: EventWriter,
        units: Sequence[Unit],
        lengths: Sequence[int],
        *,
        skipped: set[int],
        workers: int,
    ) -> None:
        """`skipped` are indices of units done by earlier runs; `workers` run side by side."""
        self._events = events
        self._tokens = [sum(lengths[u.start : u.stop]) for u in units]
        self._samples = [u.stop - u.start for u in units]
        self._workers = workers
        self._timed_tokens = 0
        self._seconds = 0.0
        done_tokens = sum(self._tokens[i] for i in skipped)
        self._counts = {
            "units": len(units),
            "units_skipped": len(skipped),
            "units_done": len(skipped),
            "samples": sum(self._samples),
            "samples_done": sum(self._samples[i] for i in skipped),
            "tokens": sum(self._tokens),
            "tokens_skipped": done_tokens,
            "tokens_done": done_tokens,
        }
        self._terminal = TokenProgress("extract", self._counts["tokens"], done=done_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all workers together, without their warm-up; None before anything was timed."""
        if self._timed_tokens == 0 or self._seconds <= 0:
            return None
        return round(self._timed_tokens / self._seconds * self._workers, 1)

    def add(self, index: int, result: UnitDone) -> None:
        """Count unit `index` and emit `progress`."""
        self._counts["units_done"] += 1
        self._counts["samples_done"] += self._samples[index]
        self._counts["tokens_done"] += self._tokens[index]
        self._timed_tokens += result.timed_tokens
        self._seconds += result.seconds
        rate = self.tokens_per_s
        left = self._counts["tokens"] - self._counts["tokens_done"]
        more: dict[str, Any] = {
            "tokens_per_s": rate,
            "eta_s": None if rate is None else round(left / rate, 1),
        }
        self._events.emit("progress", **self._counts, **more)
        self._terminal.update(self._counts["tokens_done"])

    def __enter__(self) -> Self:
        self._events.emit("start", **self._counts)
        self._terminal.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._terminal.__exit__(kind, error, trace)
