"""A drafter among several, and what all of them do between two averages."""

import threading
from collections import deque
from dataclasses import dataclass, field

from paceline.flow.channel import Lease
from paceline.flow.remote import Remote
from paceline.train.crew import PaceOf
from paceline.train.fed import Fed
from paceline.train.learner import StepResult
from paceline.train.source import Feed


@dataclass
class Asked:
    """A step that a drafter was given."""

    leases: list[Lease[Fed]]
    items: list[Fed]

    def release(self) -> None:
        """Its features are not needed any more."""
        for lease, item in zip(self.leases, self.items, strict=True):
            item.let_go()
            lease.release()


@dataclass
class Member:
    """One drafter, and what it has done since the last average."""

    number: int
    remote: Remote
    asked: deque[Asked] = field(default_factory=deque)
    results: list[StepResult] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of all samples that it has leased since then."""
    deaths: int = 0
    """In the middle of a step, since the last one that it did."""

    @property
    def consumer(self) -> str:
        """Its name in the channel."""
        return f"drafter {self.number}"

    @property
    def tokens(self) -> int:
        """Its weight in the average."""
        return sum(r.tokens for r in self.results if r.gradient_norm is not None)

    def forget(self) -> None:
        """Begin anew after an average, or a death."""
        for asked in self.asked:
            asked.release()
        self.asked.clear()
        self.results, self.positions = [], []


class Round:
    """What all drafters do between two averages; shared by their threads."""

    def __init__(self, feed: Feed, samples: int, batch: int, pace: PaceOf) -> None:
        self.feed, self.pace = feed, pace
        self._left, self._batch = samples, batch
        self._taken = 0
        self.skipped = 0
        self._lock = threading.Lock()

    def claim(self) -> tuple[int, int]:
        """Samples for the next step, 0 where there are none, and how many were taken before."""
        with self._lock:
            size = min(self._batch, self._left)
            self._left -= size
            before, self._taken = self._taken, self._taken + size
            return size, before

    def give_back(self, samples: int) -> None:
        """So many are lost, and are to be taken by others."""
        with self._lock:
            self._left += samples
            self._taken -= samples
