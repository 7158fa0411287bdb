"""JSON values out of a stream that may be cut or damaged: an array's elements, or objects in a row.

The bytes are looked at for what tells values apart, quotes, brackets and commas, and each value is
decoded by itself. So a damaged one is one damaged value, and memory holds one value, never a file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_PIECE = 1 << 18
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')


@dataclass(frozen=True, slots=True)
class Value:
    """The bytes of one value, without white space around them."""

    raw: bytes
    """The first `most` bytes where it has more."""
    is_too_long: bool = False
    is_torn: bool = False
    """Whether the stream ended in it; `raw` is then empty where the stream ended between two."""


def values(stream: BinaryIO, *, is_array: bool, most: int) -> Iterator[Value]:
    """The values of a stream: elements of the array that it is, or objects one after another.

    Of an array, the stream stands behind its opening bracket. Values of more than `most` bytes are
    passed over. What follows an array's end is one more value, which is no element.
    """
    found = _Values(is_array, most)
    while piece := stream.read(_PIECE):
        yield from found.feed(piece)
    yield from found.end()


class _Values:
    def __init__(self, is_array: bool, most: int) -> None:
        self._is_array = is_array
        self._most = most
        self._parts = bytearray()
        self._length = 0
        self._depth = 0
        self._in_text = False
        self._is_escaped = False
        self._is_over = False
        """Behind the array's closing bracket."""

    def feed(self, piece: bytes) -> Iterator[Value]:
        """Values that end in this piece."""
        start = place = 0
        while place < len(piece):
            if self._is_over:
                break
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            mark = (_INSIDE if self._in_text else _OUTSIDE).search(piece, place)
            if mark is None:
                break
            place = mark.end()
            byte = mark.group()
            if self._in_text:
                self._is_escaped = byte == b"\\"
                self._in_text = byte != b'"'
                continue
            if byte == b'"':
                self._in_text = True
            elif byte in b"[{":
                self._depth += 1
            elif byte == b"," and self._depth == 0:
                self._add(piece[start : place - 1])
                start = place
                yield from self._take(is_between=not self._is_array)
            elif byte in b"]}" and self._depth == 0:
                # Of the array itself; a bracket too many where there is none.
                self._add(piece[start : place - 1 if self._is_array else place])
                start = place
                self._is_over = self._is_array
                yield from self._take(is_between=True)
            elif byte in b"]}":
                self._depth -= 1
                if self._depth == 0 and not self._is_array:
                    self._add(piece[start:place])
                    start = place
                    yield from self._take(is_between=True)
        self._add(piece[start:])

    def end(self) -> Iterator[Value]:
        """What is left when the stream has ended."""
        raw, is_long = self._taken()
        is_inside = self._depth > 0 or self._in_text
        if self._is_array and not self._is_over:
            if raw.endswith(b"}") and not is_inside:
                yield Value(raw, is_too_long=is_long)
                raw = b""
            yield Value(raw, is_torn=True)
        elif raw:
            yield Value(raw, is_too_long=is_long, is_torn=is_inside)

    def _take(self, *, is_between: bool) -> Iterator[Value]:
        """The value that has ended; `is_between` where none need have been there."""
        raw, is_long = self._taken()
        if raw or not is_between:
            yield Value(raw, is_too_long=is_long)

    def _taken(self) -> tuple[bytes, bool]:
        raw, is_long = bytes(self._parts).strip(), self._length > self._most
        self._parts, self._length = bytearray(), 0
        return raw, is_long

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        self._parts += part[: max(0, self._most - len(self._parts))]
