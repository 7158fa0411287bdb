"""Bytes that may lie in staging at a time: reserved before they are made, freed once stored."""

import logging
import threading
from collections.abc import Iterable

from paceline.durable.amounts import size_text
from paceline.durable.errors import RecipeError

_LOG = logging.getLogger(__name__)


class Budget:
    """A number of bytes that several owners share; safe among threads, never waits.

    Raises ValueError for a limit below 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a budget of {limit} bytes")
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._held = 0
        self._peak = 0
        self._has_warned = False

    @property
    def limit(self) -> int:
        """The most bytes that `try_reserve` lets be held."""
        return self._limit

    @property
    def held(self) -> int:
        """Bytes reserved or in use now."""
        return self._held

    @property
    def peak(self) -> int:
        """The most bytes that were ever held."""
        return self._peak

    def try_reserve(self, owner: str, size: int) -> bool:
        """Hold `size` bytes for `owner`, or change nothing and return False.

        Raises ValueError for a size that can never be held (negative, above the limit) and for
        an owner that holds some already.
        """
        if not 0 <= size <= self._limit:
            raise ValueError(f"{owner}: {size} bytes of a budget of {self._limit}")
        with self._lock:
            self._refuse_second(owner)
            if self._held + size > self._limit:
                return False
            self._hold(owner, size)
            return True

    def adopt(self, owner: str, size: int) -> None:
        """Hold bytes that lie there already, even beyond the limit: nothing is reserved until then.

        Raises ValueError for an owner that holds some already.
        """
        with self._lock:
            self._refuse_second(owner)
            self._hold(owner, size)

    def settle(self, owner: str, size: int) -> None:
        """Replace a reservation by the real size.

        More than was reserved is held all the same, even beyond the limit: the bytes lie there.
        The first time that is warned of, since the estimate was no upper bound.
        """
        with self._lock:
            reserved = self._sizes[owner]
            self._held -= reserved
            self._hold(owner, size)
            is_news = size > reserved and not self._has_warned
            self._has_warned |= is_news
        if is_news:
            _LOG.warning(
                "%s takes %s bytes, and %s were reserved for it: all of it is counted now, and "
                "staging may hold more than its limit of %s for a while. This is a mistake in "
                "Paceline's estimate: please report it",
                *(owner, f"{size:,}", f"{reserved:,}", f"{self._limit:,}"),
            )

    def release(self, owner: str) -> None:
        """Let go of what `owner` holds; nothing is fine."""
        with self._lock:
            self._held -= self._sizes.pop(owner, 0)

    def _refuse_second(self, owner: str) -> None:
        if owner in self._sizes:
            raise ValueError(f"{owner} holds bytes already")

    def _hold(self, owner: str, size: int) -> None:
        self._sizes[owner] = size
        self._held += size
        self._peak = max(self._peak, self._held)


def check_budget(limit: int, sizes: Iterable[int], *, key: str = "extract.staging_bytes") -> None:
    """Refuse a budget that some unit never fits into.

    `sizes` are upper bounds of the units' bytes. Raises RecipeError, naming the smallest budget
    that works.
    """
    largest = max(sizes, default=0)
    if largest > limit:
        raise RecipeError(
            f"{key} is {limit:,} ({size_text(limit)}), and the largest shard may take "
            f"{largest:,} bytes. Give {key} at least {largest}, or lower `extract.shard_bytes` "
            "(a shard holds at least one sample)."
        )
