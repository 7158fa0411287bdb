"""Calls to a store that are made again where their error may pass."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from paceline.durable.errors import StoreFailed, no_room
from paceline.durable.stalls import Kind
from paceline.durable.store import Listed, Source, Stat, Store

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0

T = TypeVar("T")


class Patience:
    """Makes calls, from any threads, until their errors have lasted for `seconds`.

    A store that does not answer, or a folder without room, passes; a refusal does not. `waiting`
    gets the kind and the reason of a wait, `going_on` its kind and seconds: once for all calls that
    wait at the same time.
    """

    def __init__(
        self,
        seconds: float,
        waiting: Callable[[Kind, str], None],
        going_on: Callable[[Kind, float], None],
    ) -> None:
        self._seconds = seconds
        self._tell_waiting, self._tell_going_on = waiting, going_on
        self._lock = threading.Lock()
        self._waiters = 0
        self._began = 0.0

    def __call__(self, call: Callable[[], T]) -> T:
        """What `call` returns. Raises what it raises at the end of the patience, or for good."""
        since = None
        pause = _FIRST_PAUSE
        kind: Kind = "store"
        try:
            while True:
                try:
                    return call()
                except (StoreFailed, OSError) as error:
                    passing = _passing(error)
                    since = since or time.monotonic()
                    if passing is None or time.monotonic() - since + pause > self._seconds:
                        raise
                    if pause == _FIRST_PAUSE:
                        kind = passing
                        self._enter(kind, str(error))
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
        finally:
            if pause != _FIRST_PAUSE:
                self._leave(kind)

    def _enter(self, kind: Kind, reason: str) -> None:
        with self._lock:
            self._waiters += 1
            if self._waiters == 1:
                self._began = time.monotonic()
                self._tell_waiting(kind, reason)

    def _leave(self, kind: Kind) -> None:
        with self._lock:
            self._waiters -= 1
            if self._waiters == 0:
                self._tell_going_on(kind, time.monotonic() - self._began)


class PatientStore:
    """A store each call of which is made with patience."""

    def __init__(self, inner: Store, patience: Patience) -> None:
        self._inner = inner
        self._patience = patience

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._inner.url

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`."""
        return self._patience(lambda: self._inner.put(key, source, crc64))

    def head(self, key: str) -> Stat | None:
        """See `Store.head`."""
        return self._patience(lambda: self._inner.head(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        return self._patience(lambda: self._inner.get_range(key, start, end))

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`; goes on behind the last object that came."""
        found: Iterator[Listed] | None = None

        def step() -> Listed | None:
            nonlocal found
            if found is None:
                found = self._inner.list(prefix, after)
            try:
                return next(found, None)
            except BaseException:
                found = None  # one that has failed says that there is no more
                raise

        while (item := self._patience(step)) is not None:
            after = item.key
            yield item

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        names = [*keys]
        self._patience(lambda: self._inner.delete(names))


def _passing(error: StoreFailed | OSError) -> Kind | None:
    if isinstance(error, StoreFailed):
        return "store" if error.transient else None
    return "space" if no_room(error) is not None else None
