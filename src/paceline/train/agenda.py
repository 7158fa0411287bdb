"""Which samples of a training are still to be consumed, across deaths of workers and resumes."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence

_GLANCE = 0.2


class Agenda:
    """Positions of the order over all epochs, handed out once each, for several threads.

    What was handed out and got lost with a worker is handed out again, first. So the consumed ones
    need not be the first ones: those that were handed out and are not consumed are `owed`.
    """

    def __init__(self, *, consumed: int, owed: Sequence[int], end: int) -> None:
        """Go on after `consumed` positions in all, with `owed` ones before the furthest."""
        self._again = deque(sorted(owed))
        self._next = consumed + len(owed)
        self._end = end
        self._consumed = consumed
        self._out: set[int] = set()
        self._since: set[int] = set()
        self._closed = False
        self._change = threading.Condition()

    def take(self) -> int | None:
        """The next position; waits where all are handed out: any may come back until `close`.

        None after that.
        """
        with self._change:
            while not self._closed:
                position = self._take()
                if position is not None:
                    return position
                self._change.wait(_GLANCE)
            return None

    def take_more(self, limit: int) -> list[int]:
        """Up to `limit` positions that are there now; does not wait."""
        found: list[int] = []
        with self._change:
            while len(found) < limit and not self._closed:
                position = self._take()
                if position is None:
                    break
                found.append(position)
        return found

    def again(self, positions: Iterable[int]) -> None:
        """Take back what was handed out and is lost."""
        with self._change:
            back = sorted(set(positions) & self._out)
            self._out.difference_update(back)
            self._again.extendleft(reversed(back))
            self._change.notify_all()

    def consume(self, positions: Iterable[int]) -> None:
        """These count. Raises ValueError for one that is not handed out."""
        done = set(positions)
        with self._change:
            if not done <= self._out:
                raise ValueError(f"positions consumed that nobody has: {sorted(done - self._out)}")
            self._out -= done
            self._consumed += len(done)
            self._since |= done
            self._change.notify_all()

    def mark(self) -> None:
        """A checkpoint knows of all that was consumed up to here."""
        with self._change:
            self._since.clear()

    def roll_back(self) -> None:
        """Nothing counts any more that was consumed since the last mark."""
        with self._change:
            self._again = deque(sorted({*self._again, *self._since}))
            self._consumed -= len(self._since)
            self._since.clear()
            self._change.notify_all()

    @property
    def consumed(self) -> int:
        """How many count, in all."""
        with self._change:
            return self._consumed

    def is_exhausted(self, held: int) -> bool:
        """Whether nothing more comes, to who holds `held` of what was handed out."""
        with self._change:
            return not self._again and self._next == self._end and len(self._out) <= held

    @property
    def owed(self) -> tuple[int, ...]:
        """Positions before the furthest that are not consumed, rising."""
        with self._change:
            owed = sorted({*self._out, *self._again})
            # Those up to the furthest come next anyhow.
            end = self._next
            while owed and owed[-1] == end - 1:
                end = owed.pop()
            return tuple(owed)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Hand out no more, and wake who waits."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _take(self) -> int | None:
        if self._again:
            position = self._again.popleft()
        elif self._next < self._end:
            position, self._next = self._next, self._next + 1
        else:
            return None
        self._out.add(position)
        return position
