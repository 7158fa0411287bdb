"""A store each call of which is known to a watch."""

from collections.abc import Iterable, Iterator

from paceline.durable.iowatch import IoWatch
from paceline.durable.store import Listed, Source, Stat, Store


class WatchedStore:
    """Passes everything on to `inner`; what does not return is known to `watch` by its object."""

    def __init__(self, inner: Store, watch: IoWatch) -> None:
        self._inner = inner
        self._watch = watch

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._inner.url

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`."""
        with self._watch.call("put", f"{self.url}/{key}"):
            return self._inner.put(key, source, crc64)

    def head(self, key: str) -> Stat | None:
        """See `Store.head`."""
        with self._watch.call("look at", f"{self.url}/{key}"):
            return self._inner.head(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        with self._watch.call("read", f"{self.url}/{key}"):
            return self._inner.get_range(key, start, end)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`."""
        with self._watch.call("list", self.url):
            found = self._inner.list(prefix, after)
        while True:
            with self._watch.call("list", self.url):
                item = next(found, None)
            if item is None:
                return
            yield item

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        with self._watch.call("delete in", self.url):
            self._inner.delete(keys)
