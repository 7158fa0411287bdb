"""Hidden states as compressed frames: rows in byte planes, a prefix that samples share, zstandard.

A frame holds up to `frame_rows` rows of one sample, so a sample is read without its neighbours.
A codec (`codec.py`) turns rows into *planes*, bytes of one meaning each; this module codes them:

1. *Centres.* Of an exponent plane each column's median is subtracted (mod 256): channels differ
   in magnitude far more than a channel does from token to token.
2. *Prefix.* Samples of a chat template begin with the same tokens, hence with the same states up
   to a kernel's rounding. One sample is the reference; the leading rows of every other one whose
   token ids agree with its are XORed with its rows, which leaves zeros, or nearly.
3. *Entropy code.* zstandard, its fast strategy with a hash table so small that Huffman coding does
   the work. In hidden states repetitions of a few bytes are chance: looking for them, as level 1
   does, takes three times as long and makes the plane 9 % larger (SmolLM2-135M).

A plane that does not get smaller is kept as it is; a piece as long as its plane is such a one. So
coded states are never larger than the planes themselves. No torch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

Bits = npt.NDArray[np.uint16 | np.uint32]
"""Values as unsigned integers of their own size, [rows, columns]."""

Plane = npt.NDArray[np.uint8]
"""[rows, width]"""

FRAME_BYTES = 2 << 20
"""Rows of about this many bytes, uncoded, make a frame."""

_PREFIX_FRAMES = 4
"""At most so much of the reference is shared: an open shard keeps it in memory."""

_CENTRE_ROWS = 256


class Splitter(Protocol):
    """How rows become planes; the inverse gives the same bits, or nearly for a lossy one."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a row in each plane."""
        ...

    @property
    def centred(self) -> tuple[bool, ...]:
        """Which planes are exponents."""
        ...

    def split(self, rows: Bits) -> list[Plane]:
        """Rows [r, C] to planes [r, width], contiguous."""
        ...

    def join(self, planes: Sequence[Plane]) -> Bits:
        """The inverse."""
        ...


@dataclass(frozen=True)
class Coded:
    """What `encode` makes."""

    states: npt.NDArray[np.uint8]
    """[B]: the planes of each frame, coded to pieces, one behind the other."""

    ends: npt.NDArray[np.int64]
    """[frames, planes]: where each piece ends in `states`."""

    centres: Plane
    """[1, sum of the centred widths]"""

    prefix: tuple[int, int]
    """First row of the reference, and how many of its rows others may share; (0, 0) for none."""


def frame_rows(row_bytes: int) -> int:
    """Rows of a frame, for rows of `row_bytes` uncoded bytes."""
    return max(1, FRAME_BYTES // row_bytes)


def encode(
    rows: Callable[[int, int], Bits],
    ids: npt.NDArray[np.int32],
    offsets: Sequence[int],
    splitter: Splitter,
    *,
    rows_per_frame: int,
) -> Coded:
    """Code the rows of all samples.

    `rows(first, stop)` gives rows as they are at rest; `ids` [T] are the tokens; sample n is the
    rows offsets[n]:offsets[n + 1].
    """
    centres = _centres(rows, offsets[-1], splitter)
    prefix = _find_prefix(ids, offsets, max_rows=_PREFIX_FRAMES * rows_per_frame)

    def planes_of(first: int, stop: int) -> list[Plane]:
        planes = splitter.split(rows(first, stop))
        for plane, centre in zip(planes, _by_plane(centres, splitter), strict=True):
            if centre is not None:
                np.subtract(plane, centre, out=plane)
        return planes

    reference = planes_of(prefix[0], prefix[0] + prefix[1])
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=19,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
        )
    )
    states = bytearray()
    ends: list[int] = []
    for start, stop in pairwise(offsets):
        shared = _shared(ids, (start, stop), prefix)
        for first in range(start, stop, rows_per_frame):
            planes = planes_of(first, min(first + rows_per_frame, stop))
            for plane in _exclusive_or(planes, reference, first - start, shared):
                raw = plane.reshape(-1).data
                piece = compressor.compress(raw)
                states += piece if len(piece) < raw.nbytes else raw
                ends.append(len(states))
    table = np.array(ends, dtype=np.int64).reshape(-1, len(splitter.widths))
    return Coded(np.frombuffer(states, dtype=np.uint8), table, centres, prefix)


class FrameReader:
    """Decodes the frames of a shard; keeps the reference's rows once they were needed.

    Raises ValueError for bytes that `encode` cannot have made.
    """

    def __init__(
        self,
        states: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.int64],
        centres: Plane,
        prefix: tuple[int, int],
        ids: npt.NDArray[np.int32],
        offsets: Sequence[int],
        splitter: Splitter,
        *,
        rows: int,
    ) -> None:
        """`rows` are those of a full frame; the others as in `Coded` and `encode`."""
        self._states = states
        self._ends = ends.reshape(-1)
        self._centres = centres
        self._prefix = prefix
        self._ids = ids
        self._offsets = offsets
        self._splitter = splitter
        self._rows = rows
        self._first_frames = [0]
        for start, stop in pairwise(offsets):
            self._first_frames.append(self._first_frames[-1] - (start - stop) // self._rows)
        if self._ends.size != self._first_frames[-1] * len(splitter.widths):
            raise ValueError(f"{len(ends)} frames for {self._first_frames[-1]}")
        self._reference: list[Plane] | None = None

    def blocks(self, sample: int) -> Iterator[tuple[int, Bits]]:
        """The rows of a sample, a frame at a time, each with its first row within the sample."""
        start, stop = self._offsets[sample : sample + 2]
        shared = _shared(self._ids, (start, stop), self._prefix)
        reference = self._reference_planes() if shared else []
        for at, planes in self._frames(sample, stop - start):
            restored = _exclusive_or(planes, reference, at, shared)
            centres = _by_plane(self._centres, self._splitter)
            pairs = zip(restored, centres, strict=True)
            yield at, self._splitter.join([p if c is None else p + c for p, c in pairs])

    def _frames(self, sample: int, wanted: int) -> Iterator[tuple[int, list[Plane]]]:
        """The frames with the sample's first `wanted` rows: centred, shared rows still XORed."""
        decompressor = zstandard.ZstdDecompressor()
        length = self._offsets[sample + 1] - self._offsets[sample]
        piece = self._first_frames[sample] * len(self._splitter.widths)
        for at in range(0, wanted, self._rows):
            planes = []
            for width in self._splitter.widths:
                start = int(self._ends[piece - 1]) if piece else 0
                data = self._states[start : int(self._ends[piece])]
                planes.append(_plane(data, (min(self._rows, length - at), width), decompressor))
                piece += 1
            yield at, planes

    def _reference_planes(self) -> list[Plane]:
        if self._reference is None:
            first, length = self._prefix
            sample = bisect_right(self._offsets, first) - 1
            frames = [planes for _, planes in self._frames(sample, length)]
            parts = zip(*frames, strict=True)
            self._reference = [np.concatenate(planes)[:length] for planes in parts]
        return self._reference


def _plane(
    data: npt.NDArray[np.uint8], shape: tuple[int, int], decompressor: zstandard.ZstdDecompressor
) -> Plane:
    """A plane as it was coded; read-only."""
    size = shape[0] * shape[1]
    if data.size == size:
        return data.reshape(shape)
    try:
        found = decompressor.decompress(data.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes in a plane of {size}")
    return np.frombuffer(found, dtype=np.uint8).reshape(shape)


def _centres(rows: Callable[[int, int], Bits], total: int, splitter: Splitter) -> Plane:
    """Medians of the exponent planes' columns, over rows spread evenly."""
    count = min(total, _CENTRE_ROWS)
    chosen = [total * n // count for n in range(count)]
    planes = splitter.split(np.concatenate([rows(row, row + 1) for row in chosen]))
    medians = [
        np.partition(plane, count // 2, axis=0)[count // 2]
        for plane, centred in zip(planes, splitter.centred, strict=True)
        if centred
    ]
    return np.concatenate(medians)[None]


def _by_plane(centres: Plane, splitter: Splitter) -> list[Plane | None]:
    found: list[Plane | None] = []
    at = 0
    for width, centred in zip(splitter.widths, splitter.centred, strict=True):
        found.append(centres[:, at : at + width] if centred else None)
        at += width if centred else 0
    return found


def _exclusive_or(
    planes: Sequence[Plane], reference: Sequence[Plane], at: int, shared: int
) -> list[Plane]:
    """XOR the rows of a frame that begins at row `at` of its sample, as far as they are shared."""
    count = min(shared - at, len(planes[0]))
    if count <= 0:
        return list(planes)
    changed = [plane.copy() for plane in planes]
    for plane, same in zip(changed, reference, strict=True):
        np.bitwise_xor(plane[:count], same[at : at + count], out=plane[:count])
    return changed


def _shared(ids: npt.NDArray[np.int32], rows: tuple[int, int], prefix: tuple[int, int]) -> int:
    """Leading rows of a sample that are coded against the reference's; its own are not."""
    first, length = prefix
    start, stop = rows
    if start == first or not length:
        return 0
    count = min(length, stop - start)
    differ = ids[start : start + count] != ids[first : first + count]
    return int(differ.argmax()) if differ.any() else count


def _find_prefix(
    ids: npt.NDArray[np.int32], offsets: Sequence[int], *, max_rows: int
) -> tuple[int, int]:
    """First row and length of the prefix that most samples follow, as long as two of them do."""
    starts, stops = np.array(offsets[:-1]), np.array(offsets[1:])
    members = np.arange(len(starts))
    depth = 0
    while depth < max_rows:
        longer = members[stops[members] - starts[members] > depth]
        if len(longer) < 2:
            break
        tokens = ids[starts[longer] + depth]
        values, counts = np.unique(tokens, return_counts=True)
        if counts.max() < 2:
            break
        members = longer[tokens == values[counts.argmax()]]
        depth += 1
    return (int(starts[members[0]]), depth) if depth else (0, 0)
