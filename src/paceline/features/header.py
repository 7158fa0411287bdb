"""The header of a shard: what is in it, and what the whole object has to be. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import msgspec

from paceline.durable.checksum import crc64, crc64_combine
from paceline.durable.errors import ShardDamaged
from paceline.durable.store import Stat, Store
from paceline.features.format import CHECKSUM, ITEM_BYTES, LENGTH, OPENING, header_checksum

KIND = "paceline.features"

VERSIONS = ("1", "2")
"""Versions of the format that are read: 1 as the tensors lie in memory, 2 coded."""

_FIRST_READ = 64 << 10
"""Most headers are smaller: one request."""


@dataclass(frozen=True)
class Entry:
    """A tensor in the file."""

    dtype: str
    """By safetensors' name."""

    shape: tuple[int, ...]

    start: int
    """First byte in the file."""

    end: int
    """One behind the last."""

    crc64: str
    """CRC64NVME of its bytes, 16 hex digits."""


@dataclass(frozen=True)
class Header:
    """What a verified header says."""

    fingerprint: str
    """Of the extraction that made the shard."""

    layer_ids: tuple[int, ...]
    """Tapped layers, output after layer, 0-based."""

    sample_ids: tuple[str, ...]
    """N ids in the order of the rows."""

    codec: str
    """How the hidden states are coded: `none`, `planes` or `int8o`."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    """The tensors by name, in the order of the file."""

    data_start: int
    """Bytes of the header with its length: where the first tensor begins."""

    crc64: str
    """CRC64NVME of the header, 16 hex digits."""

    promised: Stat
    """Size and CRC64NVME of the WHOLE object, combined from the checksums in the header.

    An object whose header promises what a journal recorded is that object, unless its payload
    was damaged since: only reading it all proves that.
    """


class _Row(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(data: bytes | memoryview, size: int, where: str) -> Header:
    """Read and check a header.

    `data` begins with the object's first byte and holds at least its header; `size` are the
    bytes of the whole object; `where` names it in errors. Raises ShardDamaged for a header that
    is cut off, changed, foreign, of an unknown version, or that promises another size.
    """
    data_start = header_bytes(data, size, where)
    if data_start > len(data):
        _damaged(where, f"is cut off in its header, at {len(data)} bytes")
    header = bytes(data[:data_start])
    if header[LENGTH.size : CHECKSUM.start] != OPENING:
        _damaged(where, "is not a shard, or its header was changed")
    if header[CHECKSUM] != header_checksum(header):
        _damaged(where, "holds another header than was written")
    try:
        table = msgspec.json.decode(header[LENGTH.size :], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(table.pop("__metadata__"), type=dict[str, str])
        kind, version = metadata["kind"], metadata["version"]
        if kind == KIND and version.isdecimal() and version not in VERSIONS:
            _newer(where, version)
        if kind != KIND or version not in VERSIONS:
            _damaged(where, f"is of format {(kind, version)}, not {KIND} {' or '.join(VERSIONS)}")
        checksums = msgspec.json.decode(metadata["crc64"], type=dict[str, str])
        rows = {name: msgspec.json.decode(row, type=_Row) for name, row in table.items()}
        entries = _entries(rows, checksums, data_start, where)
        end = max((entry.end for entry in entries.values()), default=data_start)
        if end != size:
            _damaged(where, f"has {size} bytes where its header promises {end}")
        return Header(
            fingerprint=metadata["fingerprint"],
            layer_ids=msgspec.json.decode(metadata["layer_ids"], type=tuple[int, ...]),
            sample_ids=msgspec.json.decode(metadata["sample_ids"], type=tuple[str, ...]),
            codec=metadata.get("codec", "none"),
            metadata=metadata,
            entries=entries,
            data_start=data_start,
            crc64=header[CHECKSUM].decode(),
            promised=_promised(header, entries),
        )
    except (msgspec.MsgspecError, KeyError, ValueError, UnicodeError) as error:
        raise ShardDamaged(_sentence(where, f"has a header that makes no sense ({error})")) from (
            error
        )


def read_header(store: Store, key: str, size: int) -> Header:
    """Read an object's header alone, in one or two ranged reads.

    `size` are its bytes, as the listing of the store tells. Raises ShardDamaged as `parse_header`
    does and where the object is gone or shorter, and whatever the store raises.
    """
    where = f"{store.url}/{key}"
    try:
        data = store.get_range(key, 0, min(size, _FIRST_READ))
        needed = header_bytes(data, size, where)
        if needed > len(data):
            data += store.get_range(key, len(data), needed)
    except KeyError as error:
        raise ShardDamaged(_sentence(where, "is not there")) from error
    except ValueError as error:
        raise ShardDamaged(_sentence(where, f"has fewer than {size} bytes")) from error
    return parse_header(data, size, where)


def header_bytes(data: bytes | memoryview, size: int, where: str) -> int:
    """Bytes of the header with its length, from an object's first ones. Raises ShardDamaged."""
    if size == 0:
        _damaged(where, "is empty")
    needed = CHECKSUM.stop
    if min(size, len(data)) >= needed:
        needed = LENGTH.size + LENGTH.unpack_from(data)[0]
    if not CHECKSUM.stop <= needed <= size:
        _damaged(where, f"is cut off in its header, at {size} bytes")
    return needed


def _entries(
    rows: Mapping[str, _Row], checksums: Mapping[str, str], data_start: int, where: str
) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    at = data_start
    for name, row in rows.items():
        start, end = (data_start + offset for offset in row.data_offsets)
        size = ITEM_BYTES[row.dtype] * prod(row.shape)
        # Checksums combine to that of the file only where tensors fill it without a gap.
        if start != at or end - start != size or min(row.shape, default=0) < 0:
            _damaged(where, f"has a header that puts `{name}` at {list(row.data_offsets)}")
        entries[name] = Entry(row.dtype, row.shape, start, end, checksums[name])
        at = end
    return entries


def _promised(header: bytes, entries: Mapping[str, Entry]) -> Stat:
    whole, size = crc64(header), len(header)
    for entry in entries.values():
        length = entry.end - entry.start
        whole = crc64_combine(whole, int(entry.crc64, 16), length)
        size += length
    return Stat(size, whole)


def _newer(where: str, version: str) -> NoReturn:
    raise ShardDamaged(
        f"{where} is of format version {version}, this Paceline reads {' and '.join(VERSIONS)}. "
        "Use the version that wrote it, or extract again into a new run directory."
    )


def _damaged(where: str, what: str) -> NoReturn:
    raise ShardDamaged(_sentence(where, what))


def _sentence(where: str, what: str) -> str:
    return (
        f"{where} {what}. Run `paceline extract` again: it redoes the shards that do not hold what "
        "its journal says."
    )
