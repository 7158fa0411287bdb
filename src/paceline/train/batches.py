"""Which samples the targets capture together, and which are read because they are kept."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.train.agenda import Agenda

_WINDOW = 8
"""Batches' worth of samples that are taken at a time, and grouped by length."""

_MOST_KEPT = 64
"""Kept samples that are taken ahead of who reads them."""

_RETRIES = 3
"""Deaths or failures over one sample alone after which it is quarantined."""

_GLANCE = 0.2
"""Seconds between two looks whether something came back."""


@dataclass(frozen=True, kw_only=True)
class OnlineSamples:
    """Where the training samples of a corpus are, by their number."""

    lines: npt.NDArray[np.int64]
    """Where each sample's line begins."""
    tokens: npt.NDArray[np.int32]
    """Of each sample."""
    sample_of: Callable[[int], int]
    """The number of the sample at a position of the order over all epochs."""
    ids: Sequence[str]
    """The id of each sample."""
    batch_tokens: int
    """At most this many tokens in one forward pass, or one sample."""


class Batches:
    """The positions of an agenda, handed to targets in batches and to a reader one by one.

    For any number of threads.
    """

    def __init__(
        self,
        samples: OnlineSamples,
        agenda: Agenda,
        is_kept: Callable[[int], bool] | None = None,
    ) -> None:
        """`is_kept` says whether the sample with a number can be read; without it none is."""
        self._samples, self._agenda, self._is_kept = samples, agenda, is_kept
        self._change = threading.Condition()
        self._batches: list[tuple[int, ...]] = []
        self._kept: deque[int] = deque()
        self._coming: dict[int, list[int]] = {}
        """Numbers of samples that are captured, and later positions of the same that wait for it:
        a small corpus is handed out again before all of it is there."""
        self._failures: dict[int, int] = {}
        self._aside: set[int] = set()

    def to_capture(self, wait: float = 0.0) -> tuple[int, ...] | None:
        """The next batch; None where there is none within `wait` seconds."""
        with self._change:
            if not (self._batches or self._fill()):
                self._change.wait(wait)
            while not self._batches:
                if not self._fill():
                    return None
            return self._batches.pop(0)

    def to_read(self) -> int | None:
        """The next position whose sample is kept; waits for one, and is None once all is over."""
        with self._change:
            while not self._kept:
                if self._fill():
                    continue
                if self._agenda.is_closed:
                    return None
                self._change.wait(_GLANCE)
            position = self._kept.popleft()
            # Who fills may be waiting for this room.
            self._change.notify_all()
            return position

    def capture(self, position: int) -> None:
        """Have it captured next: it could not be read."""
        with self._change:
            self._coming.setdefault(self._samples.sample_of(position), [])
            self._batches.insert(0, (position,))
            self._change.notify_all()

    def captured(self, position: int) -> None:
        """Its sample is there, and kept if it will be."""
        with self._change:
            number = self._samples.sample_of(position)
            waiting = self._coming.pop(number, [])
            if self._is_kept is not None and self._is_kept(number):
                self._kept.extend(waiting)
            else:
                self._agenda.again(waiting)
            self._change.notify_all()

    def again(self, positions: Sequence[int]) -> None:
        """Who had these does not capture them, or could not hand them on."""
        with self._change:
            back = list(positions)
            for position in positions:
                back += self._coming.pop(self._samples.sample_of(position), [])
            self._agenda.again(back)
            self._change.notify_all()

    def failed(self, batch: Sequence[int]) -> str | None:
        """A worker died or failed over a batch: its samples come again, each alone.

        The id of the one that is given up instead: it counts, in this epoch and in later ones, and
        is not captured.
        """
        with self._change:
            if len(batch) > 1:
                self._failures.update({p: self._failures.get(p, 0) for p in batch})
            else:
                (position,) = batch
                self._failures[position] = self._failures.get(position, 0) + 1
                if self._failures[position] > _RETRIES:
                    number = self._samples.sample_of(position)
                    self._aside.add(number)
                    self._agenda.consume([position, *self._coming.pop(number, [])])
                    return self._samples.ids[number]
        self.again(batch)
        return None

    @property
    def given_up(self) -> int:
        """Samples that are not captured."""
        with self._change:
            return len(self._aside)

    def _fill(self) -> bool:
        """Take a window from the agenda; False where nothing was taken."""
        ahead = len(self._kept) + sum(map(len, self._coming.values()))
        if ahead >= _MOST_KEPT or len(self._batches) >= _WINDOW:
            return False
        # As large as several batches: fewer would be padded to their longest.
        room = _WINDOW * self._samples.batch_tokens
        positions: list[int] = []
        has_taken = False
        while room > 0 and ahead < _MOST_KEPT and (more := self._agenda.take_more(1)):
            has_taken = True
            (position,) = more
            number = self._samples.sample_of(position)
            if number in self._aside:
                self._agenda.consume(more)
            elif self._is_kept is not None and self._is_kept(number):
                self._kept.append(position)
                ahead += 1
            elif self._is_kept is not None and number in self._coming:
                self._coming[number].append(position)
                ahead += 1
            else:
                room -= int(self._samples.tokens[number])
                self._coming[number] = []
                positions.append(position)
        if positions:
            self._batches += self._grouped(positions)
        if has_taken:
            self._change.notify_all()
        return has_taken

    def _grouped(self, positions: Sequence[int]) -> list[tuple[int, ...]]:
        """Batches of samples of similar length, those of the earliest positions first."""
        length = {p: int(self._samples.tokens[self._samples.sample_of(p)]) for p in positions}
        batches: list[tuple[int, ...]] = []
        group: list[int] = []
        for position in sorted(positions, key=lambda p: (-length[p], p)):
            # The first of a group is its longest: all others are padded to it.
            is_full = group and length[group[0]] * (len(group) + 1) > self._samples.batch_tokens
            # Who failed before goes alone, so that it takes no others with it.
            if is_full or (group and {position, group[0]} & self._failures.keys()):
                batches.append(tuple(group))
                group = []
            group.append(position)
        batches.append(tuple(group))
        return sorted(batches, key=min)
