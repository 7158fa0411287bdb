"""Codecs of hidden states at rest: how rows of bfloat16 or float32 become byte planes. No torch.

`none` keeps the tensors as they lie in memory (format version 1). The others go through `frames`:

`planes`, lossless: every value is rotated left by one bit, which puts its exponent into one byte
of its own and the sign behind the mantissa; each byte of the value is a plane.

`int8o`, lossy: in every tap, and in `last`, the channels are cut into groups of 64; a group of a
token is int8 times one scale in bfloat16. Up to 16 channels of each are kept in bfloat16 instead:
those with the largest peaks, where massive activations of single tokens sit, and of the others
those with the largest mean square. They are chosen anew for every shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.features.frames import Bits, Plane, Splitter

Codec = Literal["none", "planes", "int8o"]

GROUP = 64
"""Channels that share a scale in `int8o`."""

_MOST_OUTLIERS = 16

Floats = npt.NDArray[np.float32]


def outlier_count(hidden_size: int) -> int:
    """Channels of a tap that `int8o` keeps in bfloat16."""
    return min(_MOST_OUTLIERS, hidden_size // 16)


def group_count(hidden_size: int) -> int:
    """Scales of a token and tap in `int8o`."""
    return -(-(hidden_size - outlier_count(hidden_size)) // GROUP)


@dataclass(frozen=True)
class BytePlanes:
    """The bytes of each value, the exponent's own plane first."""

    columns: int
    item_bytes: int
    """2 (bfloat16) or 4 (float32)."""

    @property
    def widths(self) -> tuple[int, ...]:
        """See `Splitter`."""
        return (self.columns,) * self.item_bytes

    @property
    def centred(self) -> tuple[bool, ...]:
        """See `Splitter`."""
        return (True, *(False,) * (self.item_bytes - 1))

    def split(self, rows: Bits) -> list[Plane]:
        """See `Splitter`."""
        top = 8 * self.item_bytes - 1
        turned = (rows << 1) | (rows >> top)
        return [
            (turned >> shift if shift else turned).astype(np.uint8)
            for shift in range(top - 7, -1, -8)
        ]

    def join(self, planes: Sequence[Plane]) -> Bits:
        """See `Splitter`."""
        dtype = np.uint16 if self.item_bytes == 2 else np.uint32
        turned = planes[0].astype(dtype)
        for plane in planes[1:]:
            turned <<= 8
            turned |= plane
        return ((turned >> 1) | (turned << (8 * self.item_bytes - 1))).astype(dtype, copy=False)


@dataclass(frozen=True, eq=False)
class Int8Outliers:
    """Codes, scales and outliers; scales and outliers as `BytePlanes`."""

    hidden_size: int
    item_bytes: int
    outliers: npt.NDArray[np.int32]
    """[S, outlier_count]: channels kept in bfloat16, rising, of each tap and of last."""

    @property
    def widths(self) -> tuple[int, ...]:
        """See `Splitter`."""
        slots = len(self.outliers)
        parts = (self._scales.widths, self._kept.widths)
        return (slots * (self.hidden_size - self.outliers.shape[1]), *parts[0], *parts[1])

    @property
    def centred(self) -> tuple[bool, ...]:
        """See `Splitter`."""
        return (False, *self._scales.centred, *self._kept.centred)

    def split(self, rows: Bits) -> list[Plane]:
        """See `Splitter`; rows are finite."""
        values = _floats(rows)
        coded = np.take(values, self._coded_columns, axis=1)
        starts, sizes = self._groups
        peaks = np.maximum.reduceat(np.abs(coded), starts, axis=1)
        # Rounded up, so that the largest of a group is never beyond 127.
        scales = ((peaks / np.float32(127)).view(np.uint32) + np.uint32(0xFFFF)) >> 16
        steps = _floats(scales.astype(np.uint16))
        steps[steps == 0] = 1
        coded /= np.repeat(steps, sizes, axis=1)
        codes = np.rint(coded, out=coded).astype(np.int8).view(np.uint8)
        kept = _bfloat16(np.take(values, self._kept_columns, axis=1))
        return [codes, *self._scales.split(scales.astype(np.uint16)), *self._kept.split(kept)]

    def join(self, planes: Sequence[Plane]) -> Bits:
        """See `Splitter`."""
        codes, scales, kept = planes[0], planes[1:3], planes[3:5]
        values = codes.view(np.int8).astype(np.float32)
        values *= np.repeat(_floats(self._scales.join(scales)), self._groups[1], axis=1)
        dtype = np.uint16 if self.item_bytes == 2 else np.uint32
        rows = np.empty((len(codes), self.outliers.shape[0] * self.hidden_size), dtype=dtype)
        rows[:, self._coded_columns] = self._at_rest(values)
        rows[:, self._kept_columns] = self._at_rest(_floats(self._kept.join(kept)))
        return rows

    def _at_rest(self, values: Floats) -> Bits:
        return _bfloat16(values) if self.item_bytes == 2 else values.view(np.uint32)

    @property
    def _scales(self) -> BytePlanes:
        return BytePlanes(len(self.outliers) * group_count(self.hidden_size), 2)

    @property
    def _kept(self) -> BytePlanes:
        return BytePlanes(self.outliers.size, 2)

    @property
    def _kept_columns(self) -> npt.NDArray[np.int64]:
        slots = np.arange(len(self.outliers))[:, None]
        return (slots * self.hidden_size + self.outliers).reshape(-1)

    @property
    def _coded_columns(self) -> npt.NDArray[np.int64]:
        coded = np.ones(len(self.outliers) * self.hidden_size, dtype=np.bool_)
        coded[self._kept_columns] = False
        return np.flatnonzero(coded)

    @property
    def _groups(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First coded column of each group, and its number of columns."""
        width = self.hidden_size - self.outliers.shape[1]
        first = np.arange(0, width, GROUP)
        sizes = np.minimum(GROUP, width - first)
        slots = np.arange(len(self.outliers))[:, None]
        return (slots * width + first).reshape(-1), np.tile(sizes, len(self.outliers))


def choose_outliers(
    blocks: Iterable[Bits], *, slots: int, hidden_size: int
) -> npt.NDArray[np.int32]:
    """Channels for `Int8Outliers`, int32 [S, outlier_count], from all rows of a shard.

    Raises ValueError where a value is not finite.
    """
    peaks = np.zeros(slots * hidden_size, dtype=np.float32)
    squares = np.zeros(slots * hidden_size, dtype=np.float64)
    for block in blocks:
        values = np.abs(_floats(block))
        np.maximum(peaks, values.max(axis=0), out=peaks)
        squares += np.square(values, dtype=np.float64).sum(axis=0)
    if not np.isfinite(peaks).all():
        raise ValueError("int8o: hidden states that are not finite cannot be coded")
    count = outlier_count(hidden_size)
    chosen = np.empty((slots, count), dtype=np.int32)
    for slot, (peak, square) in enumerate(
        zip(peaks.reshape(slots, -1), squares.reshape(slots, -1), strict=True)
    ):
        first = np.argsort(-peak, kind="stable")[: count - count // 2]
        square[first] = -1
        rest = np.argsort(-square, kind="stable")[: count // 2]
        chosen[slot] = np.sort(np.concatenate([first, rest]))
    return chosen


def splitter_for(
    codec: str, *, slots: int, hidden_size: int, item_bytes: int, outliers: npt.NDArray[np.int32]
) -> Splitter:
    """The splitter of `planes` or `int8o`; `outliers` matter to the latter alone.

    Raises ValueError for another codec.
    """
    if codec == "planes":
        return BytePlanes(slots * hidden_size, item_bytes)
    if codec == "int8o":
        return Int8Outliers(hidden_size, item_bytes, outliers)
    raise ValueError(f"no codec {codec!r}")


def _floats(bits: Bits) -> Floats:
    """The values of bfloat16 or float32 bits, in memory of their own."""
    if bits.dtype == np.uint16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32).copy()


def _bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; what would round to infinity to the largest."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded -= (rounded & 0x7FFF) == 0x7F80
    return rounded
