"""How many different tokens the answers need: what a reduced draft vocabulary would cover."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_SMALLEST = 256
_WAITING = 1 << 20
"""Bytes of ids that are counted together."""


class TokenCoverage:
    """Counts of the trained tokens, and how few of them make up how much of the text."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting: list[bytes] = []
        self._size = 0

    def add_ids(self, ids: Sequence[int]) -> None:
        """Count ids."""
        self.add(np.asarray(ids, dtype=np.uint32).tobytes())

    def add(self, ids: bytes) -> None:
        """Count ids, four bytes each in the machine's order."""
        self._waiting.append(ids)
        self._size += len(ids)
        if self._size >= _WAITING:
            self._count()

    def counts(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Occurrences by id, int64 [largest id + 1]."""
        self._count()
        return self._counts

    def curve(self) -> dict[int, float]:
        """Share of the tokens that the K most frequent ids cover, for K = 256, 512, ..."""
        counts = np.sort(self.counts()[self.counts() > 0])[::-1]
        if not counts.size:
            return {}
        covered = np.cumsum(counts) / counts.sum()
        sizes = [_SMALLEST]
        while sizes[-1] < counts.size:
            sizes.append(2 * sizes[-1])
        return {size: float(covered[min(size, counts.size) - 1]) for size in sizes}

    def numbers(self) -> dict[str, Any]:
        """For the report: JSON values."""
        counts = self.counts()
        return {
            "tokens": int(counts.sum()),
            "distinct": int((counts > 0).sum()),
            "coverage": {str(size): round(share, 6) for size, share in self.curve().items()},
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        curve = self.curve()
        if not curve:
            return
        distinct = int((self.counts() > 0).sum())
        # Cut, not rounded: 99.96 % is not all of it.
        shares = [
            f"{size:,} cover {int(share * 1000) / 10:.1f} %"
            for size, share in curve.items()
            if size < distinct and share >= 0.8
        ]
        most = f"; the most frequent {', '.join(shares)}" if shares else ""
        yield f"{distinct:,} different tokens are trained on{most}"

    def _count(self) -> None:
        if not self._waiting:
            return
        ids = np.frombuffer(b"".join(self._waiting), dtype=np.uint32)
        self._waiting, self._size = [], 0
        if not ids.size:
            return
        found = np.bincount(ids)
        if found.size > self._counts.size:
            found[: self._counts.size] += self._counts
            self._counts = found
        else:
            self._counts[: found.size] += found
