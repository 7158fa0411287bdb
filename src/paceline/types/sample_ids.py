"""Sample ids by the million: 16 bytes each instead of a string."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

_DIGITS = 32
_BYTES = _DIGITS // 2


@dataclass(frozen=True, eq=False)
class SampleIds(Sequence[str]):
    """N ids: behind each other as 16 bytes where all are 32 hex digits, else as UTF-8 text."""

    blob: bytes | memoryview
    ends: npt.NDArray[np.int64] | None = None
    """Where each id ends in `blob`, int64 [N]; None where each has 16 bytes."""

    def __len__(self) -> int:
        return len(self.blob) // _BYTES if self.ends is None else len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self.ends is None:
            return bytes(self.blob[at * _BYTES : (at + 1) * _BYTES]).hex()
        start = int(self.ends[at - 1]) if at else 0
        return bytes(self.blob[start : int(self.ends[at])]).decode()

    def take(self, indices: Iterable[int]) -> tuple[str, ...]:
        """The ids at `indices`, in their order."""
        return tuple([self[index] for index in indices])

    def first_repeated(self) -> int | None:
        """The first index whose id stands at an earlier one too; None where all differ."""
        if self.ends is None:
            return _first_repeated(np.frombuffer(self.blob, dtype="<u8").reshape(-1, 2))
        seen: set[str] = set()
        for index, sample_id in enumerate(self):
            if sample_id in seen:
                return index
            seen.add(sample_id)
        return None


class IdsBuilder:
    """Takes in ids, in order."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._sizes: list[int] | None = None

    def add(self, ids: Sequence[str]) -> None:
        """Append `ids`."""
        if self._sizes is None:
            packed = _packed(ids)
            if packed is not None:
                self._blob += packed
                return
            before = SampleIds(bytes(self._blob))
            self._blob, self._sizes = bytearray(), []
            self._append(before)
        self._append(ids)

    def ids(self) -> SampleIds:
        """All of them."""
        ends = None if self._sizes is None else np.cumsum(self._sizes, dtype=np.int64)
        return SampleIds(bytes(self._blob), ends)

    def _append(self, ids: Iterable[str]) -> None:
        assert self._sizes is not None
        for sample_id in ids:
            encoded = sample_id.encode()
            self._blob += encoded
            self._sizes.append(len(encoded))


def _packed(ids: Sequence[str]) -> bytes | None:
    """16 bytes an id; None where that would not give each back as it is."""
    if any(len(sample_id) != _DIGITS for sample_id in ids):
        return None
    digits = "".join(ids)
    try:
        packed = bytes.fromhex(digits)
    except ValueError:
        return None
    return packed if packed.hex() == digits else None


def _first_repeated(words: npt.NDArray[np.uint64]) -> int | None:
    """Of ids as two words each, [N, 2]."""
    first = np.sort(words[:, 0])
    if not np.any(first[1:] == first[:-1]):
        return None
    # Stable: of equal ids the later one stands behind.
    order = np.lexsort((words[:, 1], words[:, 0]))
    sorted_words = words[order]
    repeated = order[1:][np.all(sorted_words[1:] == sorted_words[:-1], axis=1)]
    return int(repeated.min()) if len(repeated) else None
