"""The bounded channel between what makes items and what uses them, for the threads of a process."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.durable.errors import ChannelClosed, ChannelFailed

T = TypeVar("T")


@dataclass(frozen=True)
class Meters:
    """A channel's numbers at one moment."""

    items_queued: int
    """Put and not yet leased."""
    bytes_held: int
    """Bytes queued, and leased but not yet released."""
    peak_bytes: int
    """The most that was ever held."""
    items_put: int
    items_leased: int
    bytes_put: int
    samples_committed: int
    samples_uncommitted: int
    """Leased and not committed, over all consumers."""
    put_wait: float
    """Seconds that producers have waited for room, summed over them, ongoing waits included."""
    lease_wait: float
    """Seconds that consumers have waited for items, likewise."""
    first_item: float | None = None
    """Seconds from its opening until the first item came; None before."""
    first_lease_wait: float = 0.0
    """Of `lease_wait`, those until then."""


class Lease(Generic[T]):
    """An item in the hands of a consumer."""

    def __init__(
        self,
        item: T,
        sample_ids: tuple[str, ...],
        num_bytes: int,
        on_release: "Callable[[Lease[T]], None]",
    ) -> None:
        self.sample_ids = sample_ids
        self.num_bytes = num_bytes
        self._item = (item,)
        self._on_release = on_release

    @property
    def item(self) -> T:
        """What was put. Raises ValueError after the release: its bytes no longer count."""
        if not self._item:
            raise ValueError("this lease was released; copy the item before that")
        return self._item[0]

    def release(self) -> None:
        """Give the item's bytes back to the bound; call it once there is an own copy.

        A second call does nothing.
        """
        self._item = ()
        self._on_release(self)

    def __enter__(self) -> "Lease[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Channel(Generic[T]):
    """FIFO, bounded in bytes; see the architecture's contract of the channel.

    Items are admitted in the order in which `put` was called, so a large one is never overtaken
    for ever by small ones. One that is larger than the bound is admitted when nothing else is
    held, and any where nothing is queued and a consumer waits that keeps what it has until then
    (`keeps`). The channel holds no bytes for the sake of a commit: what a consumer leased and did
    not commit is known by its ids alone, and its source makes it again.
    """

    def __init__(self, max_bytes: int, max_items: int | None = None) -> None:
        """At most `max_bytes`, and `max_items` items, are queued, or leased and not released."""
        if min(max_bytes, max_bytes if max_items is None else max_items) < 1:
            raise ValueError(f"Channel: max_bytes {max_bytes}, max_items {max_items} below 1")
        self._max_bytes, self._max_items = max_bytes, max_items
        lock = threading.Lock()
        self._room = threading.Condition(lock)
        self._items = threading.Condition(lock)
        self._lock = lock
        self._queue: deque[tuple[T, tuple[str, ...], int]] = deque()
        self._turns: deque[object] = deque()
        self._held = 0
        self._peak = 0
        self._closed = False
        self._error: BaseException | None = None
        self._uncommitted: dict[str, Counter[str]] = {}
        self._holders: dict[Lease[T], str] = {}
        self._lost: Counter[str] = Counter()
        self._put_wait = _WaitMeter()
        self._lease_wait = _WaitMeter()
        self._hungry = 0
        self._opened = time.monotonic()
        self._first: tuple[float | None, float] = (None, 0.0)
        self._items_put = 0
        self._items_leased = 0
        self._bytes_put = 0
        self._samples_committed = 0

    def put(self, item: T, sample_ids: Iterable[str], num_bytes: int) -> None:
        """Add an item of `num_bytes` that carries `sample_ids`; wait until there is room.

        Raises ChannelFailed when the channel fails, ChannelClosed when it is closed, before or
        while this waits; the item is then not in the channel.
        """
        if num_bytes < 0:
            raise ValueError(f"Channel.put: num_bytes {num_bytes} is negative")
        entry = (item, tuple(sample_ids), num_bytes)
        turn = object()
        with self._lock:
            self._turns.append(turn)
            try:
                with self._put_wait:
                    self._room.wait_for(lambda: self._may_enter(turn, num_bytes))
                self._raise_failure()
                if self._closed:
                    raise ChannelClosed("an item was put into a channel after it had been closed")
                self._queue.append(entry)
                self._held += num_bytes
                self._peak = max(self._peak, self._held)
                if not self._items_put:
                    self._first = time.monotonic() - self._opened, self._lease_wait.seconds()
                self._items_put += 1
                self._bytes_put += num_bytes
                self._items.notify_all()
            finally:
                self._turns.remove(turn)
                self._room.notify_all()

    def lease(
        self, consumer: str = "", *, timeout: float | None = None, keeps: bool = False
    ) -> Lease[T] | None:
        """Take the oldest item; wait until there is one. None when closed and drained.

        Its samples are the consumer's until `commit` or `abandon`. Raises ChannelFailed when the
        channel fails, before or while this waits; TimeoutError after `timeout` seconds without
        an item. `keeps` tells that what was leased before is not released until this one has come:
        then one is let in beyond the bound, for else both sides would wait for ever.
        """
        with self._lock:
            if keeps:
                self._hungry += 1
                self._room.notify_all()
            try:
                with self._lease_wait:
                    came = self._items.wait_for(
                        lambda: self._queue or self._closed or self._error, timeout
                    )
            finally:
                self._hungry -= keeps
            self._raise_failure()
            if not came:
                raise TimeoutError(f"no item came into the channel for {timeout:g} s")
            if not self._queue:
                return None
            item, sample_ids, num_bytes = self._queue.popleft()
            lease = Lease(item, sample_ids, num_bytes, self._release)
            self._holders[lease] = consumer
            self._uncommitted.setdefault(consumer, Counter()).update(sample_ids)
            self._items_leased += 1
            return lease

    def leases(self, consumer: str = "") -> Iterator[Lease[T]]:
        """Lease until the channel is closed and drained."""
        while (lease := self.lease(consumer)) is not None:
            yield lease

    def commit(self, sample_ids: Iterable[str], consumer: str = "") -> None:
        """Make samples that the consumer leased count. Allowed after a failure too.

        Raises ValueError, and commits nothing, where one of them is not the consumer's: never
        leased, committed before, or abandoned.
        """
        wanted = Counter(sample_ids)
        with self._lock:
            owned = self._uncommitted.get(consumer, Counter())
            foreign = [key for key, count in wanted.items() if owned[key] < count]
            if foreign:
                raise ValueError(
                    f"consumer {consumer!r} commits {len(foreign)} samples that it does not hold, "
                    f"the first is {foreign[0]}"
                )
            for key, count in wanted.items():
                owned[key] -= count
                if not owned[key]:
                    del owned[key]
                self._lost.pop(key, None)
            self._samples_committed += wanted.total()

    def uncommitted(self, consumer: str | None = None) -> tuple[str, ...]:
        """Ids leased and not committed, in order of their lease; of all consumers where None."""
        with self._lock:
            if consumer is not None:
                return tuple(self._uncommitted.get(consumer, Counter()).elements())
            return tuple(key for ids in self._uncommitted.values() for key in ids.elements())

    def abandon(self, consumer: str) -> tuple[tuple[str, int], ...]:
        """Take back what a dead consumer leased: its bytes are free, its samples nobody's.

        Returns its uncommitted ids, in order of their lease, each with the number of times that
        it has been lost in this way: they are the source's to make again, or to give up.
        """
        with self._lock:
            leases = [lease for lease, holder in self._holders.items() if holder == consumer]
            lost = tuple(self._uncommitted.pop(consumer, Counter()).elements())
            self._lost.update(set(lost))
            counts = tuple((key, self._lost[key]) for key in lost)
        for lease in leases:
            lease.release()
        return counts

    def fail(self, error: BaseException) -> None:
        """Wake every waiter with ChannelFailed, `error` as its cause; the first failure stays."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._room.notify_all()
            self._items.notify_all()

    def close(self) -> None:
        """Accept no more items; what is in the channel is still handed out."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._items.notify_all()

    def meters(self) -> Meters:
        """Read all meters at one moment."""
        with self._lock:
            return Meters(
                items_queued=len(self._queue),
                bytes_held=self._held,
                peak_bytes=self._peak,
                items_put=self._items_put,
                items_leased=self._items_leased,
                bytes_put=self._bytes_put,
                samples_committed=self._samples_committed,
                samples_uncommitted=sum(ids.total() for ids in self._uncommitted.values()),
                put_wait=self._put_wait.seconds(),
                lease_wait=self._lease_wait.seconds(),
                first_item=self._first[0],
                first_lease_wait=self._first[1],
            )

    def _may_enter(self, turn: object, num_bytes: int) -> bool:
        if self._error is not None or self._closed:
            return True
        items = len(self._queue) + len(self._holders)
        fits = self._held + num_bytes <= self._max_bytes
        fits = fits and (self._max_items is None or items < self._max_items)
        fits = fits or self._held == 0 or (self._hungry > 0 and not self._queue)
        return self._turns[0] is turn and fits

    def _release(self, lease: Lease[T]) -> None:
        with self._lock:
            if self._holders.pop(lease, None) is not None:
                self._held -= lease.num_bytes
                self._room.notify_all()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise ChannelFailed(
                f"the other side of the channel failed: {type(self._error).__name__}: {self._error}"
            ) from self._error


class _WaitMeter:
    """Seconds of waiting, summed over waiters; entered and read under the channel's lock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._waiters = 0
        self._since = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += self._waiters * (now - self._since)
        self._since = now
        return self._seconds

    def __enter__(self) -> None:
        self.seconds()
        self._waiters += 1

    def __exit__(self, *_: object) -> None:
        self.seconds()
        self._waiters -= 1
