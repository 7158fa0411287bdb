"""Files as streams of bytes, unpacked where they are packed; what is torn gives what it has."""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

_PIECE = 1 << 18
"""Bytes unpacked at a time."""
_PACKED = 1 << 12
"""Bytes read at a time: few, because each may stand for a thousand."""


@dataclass(frozen=True)
class Opened:
    """A stream, and whether it came to its proper end."""

    stream: BinaryIO
    unpacker: "_Unpacker | None"

    @property
    def torn(self) -> str | None:
        """What is wrong with the packing, known once the stream has ended; None if nothing is."""
        return None if self.unpacker is None else self.unpacker.torn


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """The bytes of a file; those of `.gz` and `.zst` unpacked.

    A packed file that is cut or damaged ends where it can no longer be unpacked.
    """
    with path.open("rb") as file:
        if path.suffix.lower() not in (".gz", ".zst"):
            yield Opened(file, None)
            return
        unpacker = _Unpacker(file, is_gzip=path.suffix.lower() == ".gz")
        with io.BufferedReader(unpacker, _PIECE) as stream:
            yield Opened(stream, unpacker)


class _Unpacker(io.RawIOBase):
    """One frame after another, as `cat` joins them."""

    def __init__(self, file: BinaryIO, *, is_gzip: bool) -> None:
        super().__init__()
        self._file = file
        self._is_gzip = is_gzip
        self._frame: Any = None
        self._packed = b""
        self._plain = b""
        self._is_behind = False
        """Behind a whole frame."""
        self.torn: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain and self.torn is None and self._unpack():
            pass
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._plain))
        view[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack some more; False at the end."""
        self._packed = self._packed or self._file.read(_PACKED)
        if not self._packed:
            if self._frame is not None:
                self.torn = f"the packed file ends early, after {self._file.tell():,} bytes"
            return False
        if self._frame is None and self._is_gzip and self._is_behind:
            # Zeros fill up the last block of a tape, as gzip knows too.
            self._packed = self._packed.lstrip(b"\0")
            if not self._packed:
                return True
        if self._frame is None:
            self._frame = _gzip_frame() if self._is_gzip else _zstd_frame()
        try:
            if self._is_gzip:
                self._plain = self._frame.decompress(self._packed, _PIECE)
                self._packed = self._frame.unconsumed_tail
            else:
                self._plain = self._frame.decompress(self._packed)
                self._packed = b""
        except (zlib.error, zstandard.ZstdError) as error:
            self.torn = f"the packed file is damaged before byte {self._file.tell():,} ({error})"
            return False
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame = None
            self._is_behind = True
        return True


def _gzip_frame() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd_frame() -> Any:
    return zstandard.ZstdDecompressor().decompressobj()
