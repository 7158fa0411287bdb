"""CRC64NVME, the checksum that object stores compute and return."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from awscrt import checksums

_BLOCK = 8 << 20

Around = Callable[[], AbstractContextManager[object]]
"""Entered for each call to a disk: what watches such calls tells of one that does not return."""


def crc64(data: bytes | memoryview, previous: int = 0) -> int:
    """CRC64NVME of `data`, continued from `previous`."""
    # awscrt is typed for bytes alone; it takes any buffer.
    return checksums.crc64nvme(data, previous)  # pyright: ignore[reportArgumentType]


def crc64_file(path: Path, *, around: Around = nullcontext) -> int:
    """CRC64NVME of a whole file, read in blocks."""
    value = 0
    with around():
        file = path.open("rb")
    with file:
        while True:
            with around():
                block = file.read(_BLOCK)
            if not block:
                return value
            value = checksums.crc64nvme(block, value)


def crc64_hex(value: int) -> str:
    """16 hex digits, the form in journals and headers."""
    return f"{value:016x}"


def crc64_combine(first: int, second: int, second_size: int) -> int:
    """CRC64NVME of two pieces behind each other, from those of the pieces."""
    return checksums.combine_crc64nvme(first, second, second_size)
