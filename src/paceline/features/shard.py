"""A shard: the features of one unit in one immutable safetensors file that verifies itself.

Tensors, T tokens of N samples behind each other, never a padded one among them::

    offsets    int64 [N + 1]      sample n is the rows offsets[n]:offsets[n + 1]
    input_ids  int32 [T]          what the target really processed
    taps       bf16 or f32 [T, L, H]
    last       as taps [T, H]     what lm_head multiplies; absent where not asked for
    loss_mask  uint8 [T]

The metadata hold the CRC64NVME of every tensor and, first of all, that of the header itself
(length, metadata and tensor table, with the checksum's own digits as zeros). Together they cover
every byte of the file.
"""

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.durable.checksum import crc64, crc64_combine, crc64_hex
from paceline.durable.errors import ShardDamaged
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.store import Stat, write_verified
from paceline.types import Features, LayerConvention, TokenBatch

FORMAT_VERSION = 1

_KIND = "paceline.features"
_LAST = "after_final_norm"
_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_OPENING = b'{"__metadata__":{"header_crc64":"'
_BLANK = b"0" * 16
_CHECKSUM = slice(_LENGTH.size + len(_OPENING), _LENGTH.size + len(_OPENING) + len(_BLANK))
_DTYPE_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

_Entry = dict[str, Any]


@dataclass(frozen=True)
class _Table:
    """What a verified header says."""

    metadata: dict[str, str]
    entries: dict[str, _Entry]
    data_start: int


def write_shard(
    path: Path, features: Features, *, fingerprint: str, fs: FileSystem = REAL_FS
) -> Stat:
    """Write a unit's features durably and atomically; return size and CRC64NVME of the file.

    `features` are on the CPU in the type at rest (bf16 or fp32); their bytes go to the file as
    they lie in memory. Raises ValueError for a tensor that cannot be written so, IntegrityError
    where the file reads back as something else, OSError where the disk refuses.
    """
    tokens = features.tokens
    tensors = {
        "offsets": tokens.offsets,
        "input_ids": tokens.input_ids.to(torch.int32),
        "taps": features.taps,
        "last": features.last,
        "loss_mask": tokens.loss_mask.to(torch.uint8),
    }
    buffers = {name: _bytes_of(name, t) for name, t in tensors.items() if t is not None}
    checksums = {name: crc64(buffer) for name, buffer in buffers.items()}
    header = _header(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        {
            "kind": _KIND,
            "version": str(FORMAT_VERSION),
            "fingerprint": fingerprint,
            "layer_ids": _json(features.layer_ids),
            "layer_convention": LayerConvention.OUTPUT_AFTER_LAYER.value,
            "last": "absent" if features.last is None else _LAST,
            "sample_ids": _json(tokens.sample_ids),
            "crc64": _json({name: crc64_hex(value) for name, value in checksums.items()}),
        },
    )
    whole = crc64(header)
    for name, buffer in buffers.items():
        whole = crc64_combine(whole, checksums[name], buffer.nbytes)
    return write_verified(path, [header, *buffers.values()], expected=whole, fs=fs)


class Shard:
    """A shard opened for reading by memory map.

    Opening checks the header and the file's size; `verify` checks every tensor, and each reader
    has to call it before it trusts the first value (`FeatureReader` does). Both raise
    ShardDamaged. Tensors that were read stay valid after the shard is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private map is writable, which is what torch wants, and never reaches the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise self._damaged("is not there") from error
        except ValueError as error:
            raise self._damaged("is empty") from error
        self._table = self._read_table()
        metadata = self._table.metadata
        self.header_crc64 = metadata["header_crc64"]
        """CRC64NVME of the header, 16 hex digits."""
        self.fingerprint = metadata["fingerprint"]
        """Of the extraction that made it."""
        self.layer_ids: tuple[int, ...] = tuple(msgspec.json.decode(metadata["layer_ids"]))
        """Tapped layers, output after layer, 0-based."""
        self.sample_ids: tuple[str, ...] = tuple(msgspec.json.decode(metadata["sample_ids"]))
        """N ids in the order of the rows."""
        self._checksums: dict[str, str] = msgspec.json.decode(metadata["crc64"])
        self._offsets: list[int] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def verify(self) -> Stat:
        """Check every byte; return size and CRC64NVME of the whole file.

        Raises ShardDamaged naming the file and the tensor.
        """
        table = self._table
        with memoryview(self._map) as view:
            whole = crc64(view[: table.data_start])
            for name, entry in table.entries.items():
                start, end = (table.data_start + at for at in entry["data_offsets"])
                found = crc64(view[start:end])
                if crc64_hex(found) != self._checksums.get(name):
                    raise self._damaged(f"holds other bytes in `{name}` than were written")
                whole = crc64_combine(whole, found, end - start)
        return Stat(len(self._map), whole)

    @property
    def features(self) -> Features:
        """Features of all N samples; taps and last are views of the map, in the type at rest."""
        return self._slice(0, len(self))

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        offsets = self._row_offsets()
        return [end - start for start, end in pairwise(offsets)]

    def read(self, row: int) -> Features:
        """Features of one sample, N = 1; taps and last are views of the map.

        Raises IndexError for a row outside [0, N).
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        return self._slice(row, row + 1)

    def _slice(self, first: int, stop: int) -> Features:
        offsets = self._row_offsets()
        rows = slice(offsets[first], offsets[stop])
        last = self._tensor("last")[rows] if "last" in self._table.entries else None
        return Features(
            tokens=TokenBatch(
                input_ids=self._tensor("input_ids")[rows].to(torch.int64),
                loss_mask=self._tensor("loss_mask")[rows].to(torch.bool),
                offsets=torch.tensor([at - rows.start for at in offsets[first : stop + 1]]),
                sample_ids=self.sample_ids[first:stop],
            ),
            taps=self._tensor("taps")[rows],
            last=last,
            layer_ids=self.layer_ids,
        )

    def _row_offsets(self) -> list[int]:
        if self._offsets is None:
            self._offsets = self._tensor("offsets").tolist()
        return self._offsets

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._table.entries[name]
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        flat = torch.frombuffer(
            self._map,
            dtype=dtype,
            count=(end - start) // dtype.itemsize,
            offset=self._table.data_start + start,
        )
        return flat.view(entry["shape"])

    def _read_table(self) -> _Table:
        size = len(self._map)
        data_start = _CHECKSUM.stop
        if size >= data_start:
            data_start = _LENGTH.size + _LENGTH.unpack_from(self._map)[0]
        if not _CHECKSUM.stop <= data_start <= size:
            raise self._damaged(f"is cut off in its header, at {size} bytes")
        header = self._map[:data_start]
        if header[_LENGTH.size : _CHECKSUM.start] != _OPENING:
            raise self._damaged("is not a shard, or its header was changed")
        if header[_CHECKSUM] != _header_checksum(header):
            raise self._damaged("holds another header than was written")
        entries: dict[str, _Entry] = msgspec.json.decode(header[_LENGTH.size :])
        metadata: dict[str, str] = entries.pop("__metadata__")  # type: ignore[assignment]
        made = (metadata.get("kind"), metadata.get("version"))
        if made != (_KIND, str(FORMAT_VERSION)):
            raise self._damaged(f"is of format {made}, not {(_KIND, str(FORMAT_VERSION))}")
        end = data_start + max(entry["data_offsets"][1] for entry in entries.values())
        if end != size:
            raise self._damaged(f"has {size} bytes where its header promises {end}")
        return _Table(metadata, entries, data_start)

    def _damaged(self, what: str) -> ShardDamaged:
        return ShardDamaged(
            f"{self.path} {what}. Run `paceline extract` again: it redoes the shards that do not "
            "hold what its journal says."
        )


def _header(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    entries: _Entry = {"__metadata__": {"header_crc64": _BLANK.decode(), **metadata}}
    at = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    body = msgspec.json.encode(entries)
    body += b" " * (-(_LENGTH.size + len(body)) % _ALIGNMENT)
    header = _LENGTH.pack(len(body)) + body
    return header[: _CHECKSUM.start] + _header_checksum(header) + header[_CHECKSUM.stop :]


def _header_checksum(header: bytes) -> bytes:
    value = crc64(header[: _CHECKSUM.start])
    value = crc64(_BLANK, value)
    return crc64_hex(crc64(header[_CHECKSUM.stop :], value)).encode()


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"`{name}` is not contiguous on the CPU")
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"`{name}` is {tensor.dtype}, which is no type at rest")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
