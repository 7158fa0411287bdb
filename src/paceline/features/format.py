"""The container of a shard: a safetensors file whose header covers every byte. No torch.

A file is the length of the header (8 bytes), the header (JSON: metadata and the tensor table,
padded with spaces so that the tensors begin aligned), and the tensors behind each other. The
metadata hold the CRC64NVME of every tensor (`crc64`) and, first of all, that of the header itself
(`header_crc64`: length, metadata and table, with the checksum's own digits as zeros).
"""

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import crc64, crc64_combine, crc64_hex
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.store import Stat, write_verified

ITEM_BYTES = {"I64": 8, "I32": 4, "U8": 1, "BF16": 2, "F32": 4}
"""Bytes of a value of each type at rest, by safetensors' names."""

LENGTH = struct.Struct("<Q")
"""What a file begins with: bytes of the header behind it."""

OPENING = b'{"__metadata__":{"header_crc64":"'
"""What the header begins with."""

_BLANK = b"0" * 16

CHECKSUM = slice(LENGTH.size + len(OPENING), LENGTH.size + len(OPENING) + len(_BLANK))
"""Where the header's own checksum stands, 16 hex digits."""

_ALIGNMENT = 64

Tensor = tuple[str, Sequence[int], bytes | memoryview]
"""Type by safetensors' name, shape, and the bytes as they lie in memory, in C order."""


def write_tensors(
    path: Path,
    entries: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    fs: FileSystem = REAL_FS,
) -> Stat:
    """Write a container durably and atomically; return size and CRC64NVME of the file.

    The checksums are added to `metadata`; the rest is the caller's. Raises ValueError where bytes
    do not fit type and shape, IntegrityError where the file reads back as something else, OSError
    where the disk refuses.
    """
    buffers = {name: _flat(name, tensor) for name, tensor in entries.items()}
    checksums = {name: crc64(buffer) for name, buffer in buffers.items()}
    table = {
        name: (dtype, shape, buffers[name].nbytes) for name, (dtype, shape, _) in entries.items()
    }
    sums = {name: crc64_hex(value) for name, value in checksums.items()}
    header = _header(table, {**metadata, "crc64": json_text(sums)})
    whole = crc64(header)
    for name, buffer in buffers.items():
        whole = crc64_combine(whole, checksums[name], buffer.nbytes)
    chunks = [header, *(buffer for buffer in buffers.values() if buffer.nbytes)]
    return write_verified(path, chunks, expected=whole, fs=fs)


def header_checksum(header: bytes) -> bytes:
    """The 16 hex digits that have to stand at `CHECKSUM` in this header (with its length)."""
    value = crc64(header[: CHECKSUM.start])
    value = crc64(_BLANK, value)
    return crc64_hex(crc64(header[CHECKSUM.stop :], value)).encode()


def json_text(value: Any) -> str:
    """Compact JSON, the form of every value in the metadata that is no plain word."""
    return msgspec.json.encode(value).decode()


def _header(table: Mapping[str, tuple[str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"header_crc64": _BLANK.decode(), **metadata}}
    at = 0
    for name, (dtype, shape, size) in table.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    body = msgspec.json.encode(entries)
    body += b" " * (-(LENGTH.size + len(body)) % _ALIGNMENT)
    header = LENGTH.pack(len(body)) + body
    return header[: CHECKSUM.start] + header_checksum(header) + header[CHECKSUM.stop :]


def _flat(name: str, tensor: Tensor) -> memoryview:
    dtype, shape, data = tensor
    view = memoryview(data)
    if view.nbytes != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"`{name}`: {view.nbytes} bytes for {dtype} {list(shape)}")
    # An empty view cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
