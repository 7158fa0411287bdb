"""A shard: the features of one unit in one immutable safetensors file that verifies itself.

Tensors, T tokens of N samples behind each other, never a padded one among them::

    offsets    int64 [N + 1]      sample n is the rows offsets[n]:offsets[n + 1]
    input_ids  int32 [T]          what the target really processed
    taps       bf16 or f32 [T, L, H]
    last       as taps [T, H]     what lm_head multiplies; absent where not asked for
    loss_mask  uint8 [T]

That is format version 1, codec `none`. With another codec (version 2) these take the place of
taps and last::

    frames     int64 [F, P]       ends of the pieces of each frame within `states`
    states     uint8 [B]          the pieces (`frames.py`)
    centres    uint8 [C]
    outliers   int32 [S, K]       channels kept as they are (int8o alone)

The header's checksums cover every byte of the file (`format.py`).
"""

import mmap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from paceline.durable.checksum import crc64, crc64_combine, crc64_hex
from paceline.durable.errors import ShardDamaged
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.store import Stat
from paceline.features.codec import Codec, choose_outliers, splitter_for
from paceline.features.format import ITEM_BYTES, Tensor, json_text, write_tensors
from paceline.features.frames import Bits, FrameReader, encode, frame_rows
from paceline.features.header import KIND, parse_header
from paceline.types import Features, LayerConvention, TokenBatch

FORMAT_VERSION = 1

_CODED_VERSION = 2
_LAST = "after_final_norm"
_DTYPE_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_BITS = {"BF16": (torch.int16, np.uint16), "F32": (torch.int32, np.uint32)}


def write_shard(
    path: Path,
    features: Features,
    *,
    fingerprint: str,
    codec: Codec = "none",
    fs: FileSystem = REAL_FS,
) -> Stat:
    """Write a unit's features durably and atomically; return size and CRC64NVME of the file.

    `features` are on the CPU in the type at rest (bf16 or fp32). Without a codec their bytes go
    to the file as they lie in memory. Raises ValueError for a tensor that cannot be written so
    (`int8o`: for states that are not finite), IntegrityError where the file reads back as
    something else, OSError where the disk refuses.
    """
    tokens = features.tokens
    plain = {
        "offsets": tokens.offsets,
        "input_ids": tokens.input_ids.to(torch.int32),
        "taps": features.taps,
        "last": features.last,
        "loss_mask": tokens.loss_mask.to(torch.uint8),
    }
    entries = {name: _entry(name, tensor) for name, tensor in plain.items() if tensor is not None}
    metadata = {
        "kind": KIND,
        "version": str(FORMAT_VERSION if codec == "none" else _CODED_VERSION),
        "fingerprint": fingerprint,
        "layer_ids": json_text(features.layer_ids),
        "layer_convention": LayerConvention.OUTPUT_AFTER_LAYER.value,
        "last": "absent" if features.last is None else _LAST,
        "sample_ids": json_text(tokens.sample_ids),
    }
    if codec != "none":
        coded, more = _coded(features, plain["input_ids"], codec)
        entries = {
            "offsets": entries["offsets"],
            "input_ids": entries["input_ids"],
            **coded,
            "loss_mask": entries["loss_mask"],
        }
        metadata |= more
    return write_tensors(path, entries, metadata, fs=fs)


class Shard:
    """A shard opened for reading by memory map. For one thread.

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
        with memoryview(self._map) as view:
            self.header = parse_header(view, len(view), str(path))
        self.header_crc64 = self.header.crc64
        """CRC64NVME of the header, 16 hex digits."""
        self.fingerprint = self.header.fingerprint
        """Of the extraction that made it."""
        self.layer_ids = self.header.layer_ids
        """Tapped layers, output after layer, 0-based."""
        self.sample_ids = self.header.sample_ids
        """N ids in the order of the rows."""
        self._offsets: list[int] | None = None
        self._frames: FrameReader | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def verify(self) -> Stat:
        """Check every byte; return size and CRC64NVME of the whole file.

        Raises ShardDamaged naming the file and the tensor.
        """
        with memoryview(self._map) as view:
            whole = crc64(view[: self.header.data_start])
            for name, entry in self.header.entries.items():
                found = crc64(view[entry.start : entry.end])
                if crc64_hex(found) != entry.crc64:
                    raise self._damaged(f"holds other bytes in `{name}` than were written")
                whole = crc64_combine(whole, found, entry.end - entry.start)
        return Stat(len(self._map), whole)

    @property
    def features(self) -> Features:
        """Features of all N samples in the type at rest; without a codec, views of the map."""
        return self._slice(0, len(self))

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        offsets = self._row_offsets()
        return [end - start for start, end in pairwise(offsets)]

    def read(self, row: int) -> Features:
        """Features of one sample, N = 1; without a codec, taps and last are views of the map.

        Raises IndexError for a row outside [0, N), ShardDamaged for frames that cannot be decoded.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        return self._slice(row, row + 1)

    def _slice(self, first: int, stop: int) -> Features:
        offsets = self._row_offsets()
        rows = slice(offsets[first], offsets[stop])
        if self.header.codec == "none":
            taps = self._tensor("taps")[rows]
            last = self._tensor("last")[rows] if "last" in self.header.entries else None
        else:
            taps, last = self._decoded(first, stop)
        return Features(
            tokens=TokenBatch(
                input_ids=self._tensor("input_ids")[rows].to(torch.int64),
                loss_mask=self._tensor("loss_mask")[rows].to(torch.bool),
                offsets=torch.tensor([at - rows.start for at in offsets[first : stop + 1]]),
                sample_ids=self.sample_ids[first:stop],
            ),
            taps=taps,
            last=last,
            layer_ids=self.layer_ids,
        )

    def _decoded(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        metadata, layers = self.header.metadata, len(self.layer_ids)
        offsets, hidden = self._row_offsets(), int(metadata["hidden_size"])
        total, dtype = offsets[stop] - offsets[first], _DTYPES[metadata["dtype"]]
        taps = torch.empty(total, layers, hidden, dtype=dtype)
        last = torch.empty(total, hidden, dtype=dtype) if metadata["last"] == _LAST else None
        try:
            if self._frames is None:
                self._frames = self._open_frames()
            for sample in range(first, stop):
                for at, rows in self._frames.blocks(sample):
                    begin = offsets[sample] - offsets[first] + at
                    place = slice(begin, begin + len(rows))
                    _bits(taps)[place] = rows[:, : layers * hidden]
                    if last is not None:
                        _bits(last)[place] = rows[:, layers * hidden :]
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            raise self._damaged(f"holds frames that cannot be decoded ({error})") from error
        return taps, last

    def _open_frames(self) -> FrameReader:
        metadata = self.header.metadata
        slots = len(self.layer_ids) + (metadata["last"] == _LAST)
        hidden, item = int(metadata["hidden_size"]), ITEM_BYTES[metadata["dtype"]]
        coded = "outliers" in self.header.entries
        splitter = splitter_for(
            self.header.codec,
            slots=slots,
            hidden_size=hidden,
            item_bytes=item,
            outliers=self._array("outliers") if coded else np.empty((slots, 0), np.int32),
        )
        return FrameReader(
            self._array("states"),
            self._array("frames"),
            self._array("centres")[None],
            msgspec.json.decode(metadata["prefix"], type=tuple[int, int]),
            self._array("input_ids"),
            self._row_offsets(),
            splitter,
            rows=int(metadata["frame_rows"]),
        )

    def _row_offsets(self) -> list[int]:
        if self._offsets is None:
            self._offsets = self._tensor("offsets").tolist()
        return self._offsets

    def _array(self, name: str) -> npt.NDArray:
        return self._tensor(name).numpy()

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self.header.entries[name]
        dtype = _DTYPES[entry.dtype]
        count = (entry.end - entry.start) // dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def _damaged(self, what: str) -> ShardDamaged:
        return ShardDamaged(
            f"{self.path} {what}. Run `paceline extract` again: it redoes the shards that do not "
            "hold what its journal says."
        )


def _coded(
    features: Features, ids: torch.Tensor, codec: Codec
) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """The tensors that take the place of taps and last, and what the metadata say of them."""
    parts = [features.taps] if features.last is None else [features.taps, features.last]
    bits = [_bits(part) for part in parts]
    hidden, total = features.taps.shape[2], len(features.taps)
    slots, dtype = len(features.layer_ids) + len(parts) - 1, _DTYPE_NAMES[features.taps.dtype]
    size = frame_rows(slots * hidden * ITEM_BYTES[dtype])

    def rows(first: int, stop: int) -> Bits:
        return np.concatenate([part[first:stop] for part in bits], axis=1)

    outliers = np.empty((slots, 0), np.int32)
    if codec == "int8o":
        blocks = (rows(at, min(at + size, total)) for at in range(0, total, size))
        outliers = choose_outliers(blocks, slots=slots, hidden_size=hidden)
    splitter = splitter_for(
        codec,
        slots=slots,
        hidden_size=hidden,
        item_bytes=ITEM_BYTES[dtype],
        outliers=outliers,
    )
    offsets = features.tokens.offsets.tolist()
    coded = encode(rows, ids.numpy(), offsets, splitter, rows_per_frame=size)
    entries: dict[str, Tensor] = {
        "frames": ("I64", coded.ends.shape, coded.ends.data),
        "states": ("U8", [coded.states.size], coded.states.data),
        "centres": ("U8", [coded.centres.size], coded.centres.data),
    }
    if codec == "int8o":
        entries["outliers"] = ("I32", outliers.shape, outliers.data)
    return entries, {
        "codec": codec,
        "dtype": dtype,
        "hidden_size": str(hidden),
        "frame_rows": str(size),
        "prefix": json_text(coded.prefix),
    }


def _bits(tensor: torch.Tensor) -> Bits:
    """Rows of the tensor as unsigned integers, [T, ...], without a copy."""
    signed, unsigned = _BITS[_DTYPE_NAMES[tensor.dtype]]
    return tensor.detach().flatten(1).view(signed).numpy().view(unsigned)


def _entry(name: str, tensor: torch.Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"`{name}` is not contiguous on the CPU")
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"`{name}` is {tensor.dtype}, which is no type at rest")
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data
