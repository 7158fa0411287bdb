"""A store that fails as stores do, on purpose and repeatably: for drills and tests."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from pathlib import Path

from paceline.durable.checksum import crc64 as crc64_of
from paceline.durable.errors import StoreFailed
from paceline.durable.store import Listed, Source, Stat, Store


class Fault(Enum):
    """What can go wrong with one call."""

    ERROR_BEFORE = "refused, nothing was done"
    ERROR_AFTER = "done, and the answer was lost"
    TRUNCATED = "put: half of it is kept, and reported as whole"
    EMPTY = "put: nothing of it is kept, and reported as whole"
    STALL = "done after a long wait"


Plan = Callable[[str, str, int], Fault | None]
"""The fault of an operation (`put`, `head`, `get_range`, `list`, `delete`) on a key, at its n-th
call from 1."""


class FaultyStore:
    """Any store, with faults; threads may share it.

    Which call fails depends on `seed`, operation, key and how often it was tried alone, so a run is
    repeated by its seed, however its threads interleave. What is stored lives in `inner`: over a
    `LocalStore` it survives the process.
    """

    def __init__(
        self,
        inner: Store,
        *,
        seed: int = 0,
        faults: Mapping[Fault, float] | Plan | None = None,
        stall_seconds: float = 1.0,
        bytes_per_second: float | None = None,
    ) -> None:
        """`faults`: a probability per call for each kind, or a function that decides.

        `bytes_per_second` is what all threads together can put and get; None for no limit. Raises
        ValueError for probabilities that add up to more than 1.
        """
        self._inner = inner
        self._plan = faults if callable(faults) else by_chance(seed, faults or {})
        self._stall_seconds = stall_seconds
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._link_free = 0.0
        self.injected: Counter[Fault] = Counter()
        """How often each fault has happened."""

    @property
    def url(self) -> str:
        """That of the store behind it."""
        return self._inner.url

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`; may report as whole what it has kept a part of."""
        fault = self._before("put", key)
        self._travel(_size(source))
        if fault in (Fault.TRUNCATED, Fault.EMPTY):
            data = source.read_bytes() if isinstance(source, Path) else bytes(source)
            self._inner.put(key, data[: len(data) // 2] if fault is Fault.TRUNCATED else b"")
            return Stat(len(data), crc64_of(data) if crc64 is None else crc64)
        stat = self._inner.put(key, source, crc64)
        self._after(fault, "put", key)
        return stat

    def head(self, key: str) -> Stat | None:
        """See `Store.head`."""
        fault = self._before("head", key)
        stat = self._inner.head(key)
        self._after(fault, "head", key)
        return stat

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        fault = self._before("get_range", key)
        data = self._inner.get_range(key, start, end)
        self._travel(len(data))
        self._after(fault, "get_range", key)
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`; its fault shows at the call, not in the middle."""
        fault = self._before("list", prefix)
        self._after(fault, "list", prefix)
        return self._inner.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`; one fault for all keys."""
        names = list(keys)
        first = names[0] if names else ""
        fault = self._before("delete", first)
        self._inner.delete(names)
        self._after(fault, "delete", first)

    def _before(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            self._calls[operation, key] += 1
            fault = self._plan(operation, key, self._calls[operation, key])
            if fault in (Fault.TRUNCATED, Fault.EMPTY) and operation != "put":
                fault = None
            if fault is not None:
                self.injected[fault] += 1
        if fault is Fault.STALL:
            time.sleep(self._stall_seconds)
        if fault is Fault.ERROR_BEFORE:
            raise self._failed(operation, key, fault)
        return fault

    def _after(self, fault: Fault | None, operation: str, key: str) -> None:
        if fault is Fault.ERROR_AFTER:
            raise self._failed(operation, key, fault)

    def _travel(self, size: int) -> None:
        """Wait until the link, which is one for all threads, has carried `size` bytes."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._link_free = max(now, self._link_free) + size / self._rate
            wait = self._link_free - now
        time.sleep(wait)

    def _failed(self, operation: str, key: str, fault: Fault) -> StoreFailed:
        return StoreFailed(
            f"{self.url}: {operation} {key}: {fault.value} (a fault made on purpose).",
            transient=True,
        )


def by_chance(seed: int, faults: Mapping[Fault, float]) -> Plan:
    """A plan with these probabilities per call; equal seeds make equal plans.

    Raises ValueError for probabilities that add up to more than 1.
    """
    if any(chance < 0 for chance in faults.values()) or sum(faults.values()) > 1 + 1e-9:
        raise ValueError(f"no probabilities: {faults}")

    def plan(operation: str, key: str, number: int) -> Fault | None:
        digest = blake2b(f"{seed} {operation} {key} {number}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest) / 2**64
        for fault, chance in faults.items():
            if drawn < chance:
                return fault
            drawn -= chance
        return None

    return plan


def _size(source: Source) -> int:
    return source.stat().st_size if isinstance(source, Path) else memoryview(source).nbytes
