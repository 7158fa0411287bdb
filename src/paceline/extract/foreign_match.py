"""Which file of a foreign cache holds which sample: by exact token ids, never by name or number."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.durable.errors import DataError
from paceline.extract.foreign_files import OTHER_FORMAT, Cache, Shape, Unreadable, read_ids
from paceline.types.rows import Rows, read_tokens
from paceline.watch.words import counted

_EVERY = 10.0
"""Seconds between two words on how far a scan is."""


class TokenIndex:
    """The corpus's samples by a hash of their token ids; about 150 bytes each."""

    def __init__(self, rows: Rows, source: Path) -> None:
        """Read the corpus once. Raises DataError where it is not what `rows` indexes."""
        self._numbers: dict[bytes, int] = {}
        self.first = np.arange(len(rows), dtype=np.int64)
        """For each sample the first one of the same token ids, which is mostly itself."""
        for number, row in enumerate(read_tokens(source, rows.positions.tolist())):
            digest = _digest(np.asarray(row.input_ids, dtype="<i8"))
            self.first[number] = self._numbers.setdefault(digest, number)
        self._lengths = frozenset(rows.lengths.tolist())

    def find(self, ids: npt.NDArray[np.int64], *, pads: bool) -> list[int]:
        """The samples of these ids; with `pads` those that are all but zeros at their end, too."""
        ends = range(_end_of_content(ids), len(ids) + 1) if pads else (len(ids),)
        return list(self._found(ids, [end for end in ends if end in self._lengths]))

    def _found(self, ids: npt.NDArray[np.int64], ends: list[int]) -> Iterator[int]:
        hashed, at = _hasher(), 0
        for end in ends:
            hashed.update(ids[at:end].astype("<i8", copy=False).tobytes())
            at = end
            number = self._numbers.get(hashed.digest())
            if number is not None:
                yield number


@dataclass
class Scan:
    """What was found in a cache."""

    place: npt.NDArray[np.int32]
    """The file of each sample that is the first of its token ids, -1 without one; int32 [N]."""

    duplicates: list[int] = field(default_factory=list)
    """Files whose samples a file before them holds."""

    unmatched: list[int] = field(default_factory=list)
    """Files whose token ids are no sample's."""

    unreadable: dict[int, Unreadable] = field(default_factory=dict)
    """By file."""


def first_shape(cache: Cache, hidden_size: int) -> Shape:
    """The shape of the first file that can be read. Raises DataError where none can."""
    refused: list[Unreadable] = []
    for path in cache.files:
        try:
            return read_ids(path, cache.kind, hidden_size)[1]
        except Unreadable as error:
            refused.append(error)
    raise DataError(
        f"{cache.root}: none of {counted(len(cache.files), 'file')} can be read as {cache.tool} "
        f"writes them; {cache.name(0)}: {refused[0]}."
    )


def scan(
    cache: Cache, index: TokenIndex, shape: Shape, hidden_size: int, tell: Callable[[str], None]
) -> Scan:
    """Look at every file once, one after the other; keeps no states.

    `tell` gets a word now and then on how far it is.
    """
    found = Scan(np.full(len(index.first), -1, dtype=np.int32))
    told = time.monotonic()
    for number, path in enumerate(cache.files):
        try:
            ids, of_file = read_ids(path, cache.kind, hidden_size)
            if of_file != shape:
                raise Unreadable(OTHER_FORMAT, "it has other states than the first file")
        except Unreadable as error:
            found.unreadable[number] = error
            continue
        samples = index.find(ids, pads=cache.pads)
        new = [sample for sample in samples if found.place[sample] < 0]
        found.place[new] = number
        if not samples:
            found.unmatched.append(number)
        elif not new:
            found.duplicates.append(number)
        if time.monotonic() - told >= _EVERY:
            told = time.monotonic()
            tell(f"looked at {number + 1:,} of {len(cache.files):,} files")
    return found


def files_of(found: Scan, index: TokenIndex, samples: Collection[int]) -> list[int] | None:
    """The file of each of these samples, in their order; None where one has none."""
    places = found.place[index.first[list(samples)]]
    return None if (places < 0).any() else places.tolist()


def _end_of_content(ids: npt.NDArray[np.int64]) -> int:
    """Where the zeros begin that end a sequence."""
    content = np.flatnonzero(ids)
    return int(content[-1]) + 1 if len(content) else 0


def _digest(ids: npt.NDArray[np.int64]) -> bytes:
    hashed = _hasher()
    hashed.update(ids.tobytes())
    return hashed.digest()


def _hasher() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)
