"""What is put into an object store, as bytes whose checksum is taken on their way out."""

from collections.abc import Iterator
from pathlib import Path

from paceline.durable.checksum import crc64 as crc64_of
from paceline.durable.checksum import crc64_file, crc64_hex
from paceline.durable.errors import IntegrityError
from paceline.durable.iowatch import IoWatch
from paceline.durable.store import Source, Stat

_MOST_PARTS = 10_000
_MIB = 1 << 20


def part_size(size: int, least: int) -> int:
    """Bytes per part of an object of `size`: `least`, or what 10,000 parts reach with."""
    if size <= least * _MOST_PARTS:
        return least
    return -(-size // (_MOST_PARTS * _MIB)) * _MIB


def promise(source: Source, crc64: int | None) -> Stat:
    """Size and checksum of the source; the checksum is the given one, or read from it."""
    if isinstance(source, Path):
        size = source.stat().st_size
        return Stat(size, crc64_file(source) if crc64 is None else crc64)
    view = memoryview(source)
    return Stat(view.nbytes, crc64_of(view) if crc64 is None else crc64)


def whole(source: Source, promised: Stat) -> bytes:
    """All bytes of a small source. Raises IntegrityError where they are not the promised ones."""
    data = source.read_bytes() if isinstance(source, Path) else bytes(source)
    _check(source, Stat(len(data), crc64_of(data)), promised)
    return data


def pieces(
    source: Source, promised: Stat, size: int, watch: IoWatch | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes in pieces of `size`, as they are sent. Reading each is a call known to `watch`.

    Raises IntegrityError after the last one where they were not the promised ones: the upload
    that consumes them must not be completed then.
    """
    checksum = total = 0
    for piece in _cut(source, size, watch or IoWatch()):
        checksum = crc64_of(piece, checksum)
        total += len(piece)
        yield piece
    _check(source, Stat(total, checksum), promised)


def words(size: int, crc64: int | None) -> str:
    """`123 bytes and checksum 00..`, for messages."""
    return f"{size} bytes and " + (
        "no checksum" if crc64 is None else f"checksum {crc64_hex(crc64)}"
    )


def _cut(source: Source, size: int, watch: IoWatch) -> Iterator[bytes | memoryview]:
    if not isinstance(source, Path):
        view = memoryview(source).cast("B")
        for start in range(0, len(view), size):
            # A piece that is asked for is a sign of life.
            with watch.call("read"):
                piece = view[start : start + size]
            yield piece
        return
    with source.open("rb") as file:
        while True:
            with watch.call("read", source):
                piece = file.read(size)
            if not piece:
                return
            yield piece


def _check(source: Source, found: Stat, promised: Stat) -> None:
    if found != promised:
        name = f"{source}: " if isinstance(source, Path) else ""
        raise IntegrityError(
            f"{name}promised were {words(promised.size, promised.crc64)}, and there are "
            f"{words(found.size, found.crc64)}. The bytes have changed since: make them again."
        )
