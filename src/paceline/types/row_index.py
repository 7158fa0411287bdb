"""The index of a corpus in a file, so that a resume need not read millions of lines again.

One line of JSON (`_Head`), then the arrays of `Rows` behind each other, then the CRC64NVME of all
that as 8 bytes, little-endian. The file is never needed: where it does not fit, it is made anew.
"""

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from paceline.durable.checksum import crc64
from paceline.durable.errors import DataError
from paceline.durable.fs import REAL_FS, FileSystem, atomic_file
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.types.rows import Rows, index_rows
from paceline.types.sample import Split
from paceline.types.sample_ids import SampleIds

FILE_NAME = "rows.index"

_VERSION = 3
_SUM = struct.Struct("<Q")
_ID_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class _Head:
    version: int
    digest: str
    """Of the corpus file."""
    vocab_size: int
    max_position: int
    """The limits that its samples were checked against."""
    only: Split | None
    """The split whose samples are here; None: all but the held-out ones."""
    samples: int
    id_bytes: int | None
    """Of all ids, where they are not 16 bytes each."""
    heldout: int
    without_loss: int
    other: int
    """Of another split than `only`."""
    read: int
    """Lines of the corpus file."""


def open_rows(
    path: Path,
    digest: str,
    *,
    vocab_size: int,
    max_position: int,
    only: Split | None = None,
    index: Path,
    watch: IoWatch | None = None,
) -> Rows:
    """The samples of the corpus file of this digest, from the file `index` where that fits.

    `only` is the split whose samples are taken; None takes all but the held-out ones. Each needs
    a file of its own. Where `index` does not fit, the corpus is read, and `index` is written; that
    it cannot be written costs the next start a few seconds and is no error. Calls that do not
    return are known to `watch`. Raises what `index_rows` raises, and DataError where the corpus is
    not the one of `digest` any more.
    """
    watch = watch or IoWatch()
    with watch.call("read index", index):
        rows = load_index(
            index, digest, vocab_size=vocab_size, max_position=max_position, only=only
        )
    if rows is not None:
        return rows
    rows = index_rows(
        path,
        vocab_size=vocab_size,
        max_position=max_position,
        only=only,
        around=lambda: watch.call("read corpus", path),
    )
    if rows.digest != digest:
        raise DataError(
            f"{path}: changed while it was read ({digest} before, {rows.digest} now). Let whatever "
            "writes it end, then run this again."
        )
    with contextlib.suppress(OSError):
        _save(index, rows, vocab_size, max_position, only, WatchedFs(REAL_FS, watch))
    return rows


def load_index(
    index: Path,
    digest: str,
    *,
    vocab_size: int | None = None,
    max_position: int | None = None,
    only: Split | None = None,
) -> Rows | None:
    """What the file `index` says of the corpus of this digest, checked against these limits.

    None where it is missing, damaged, of another corpus, of other splits than `only` says (None:
    all but the held-out samples), or checked against other limits (where None takes any).
    """
    try:
        data = index.read_bytes()
    except OSError:
        return None
    body = memoryview(data)[: -_SUM.size]
    if len(data) < _SUM.size or crc64(body) != _SUM.unpack(data[-_SUM.size :])[0]:
        return None
    first, _, _ = data.partition(b"\n")
    try:
        head = msgspec.json.decode(first, type=_Head)
    except msgspec.MsgspecError:
        return None
    wanted = (_VERSION, digest, only, vocab_size or head.vocab_size)
    if (head.version, head.digest, head.only, head.vocab_size) != wanted:
        return None
    if max_position not in (None, head.max_position):
        return None
    return _rows(head, data, len(first) + 1)


def _rows(head: _Head, data: bytes, at: int) -> Rows:
    def take(dtype: type[np.integer], count: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(data, dtype=dtype, count=count, offset=at)
        at += found.nbytes
        return found

    n = head.samples
    positions, lengths, loss_tokens = take(np.int64, n), take(np.int32, n), take(np.int32, n)
    ends = None if head.id_bytes is None else take(np.int64, n)
    size = n * _ID_BYTES if head.id_bytes is None else head.id_bytes
    ids = SampleIds(memoryview(data)[at : at + size], ends)
    return Rows(
        ids,
        lengths,
        loss_tokens,
        positions,
        head.heldout,
        head.without_loss,
        head.other,
        head.read,
        head.digest,
    )


def _save(
    index: Path,
    rows: Rows,
    vocab_size: int,
    max_position: int,
    only: Split | None,
    fs: FileSystem,
) -> None:
    ids = rows.sample_ids
    head = _Head(
        version=_VERSION,
        digest=rows.digest,
        vocab_size=vocab_size,
        max_position=max_position,
        only=only,
        samples=len(rows),
        id_bytes=None if ids.ends is None else len(ids.blob),
        heldout=rows.heldout,
        without_loss=rows.without_loss,
        other=rows.other,
        read=rows.read,
    )
    arrays = [rows.positions, rows.lengths, rows.loss_tokens]
    if ids.ends is not None:
        arrays.append(ids.ends)
    checksum = 0
    with atomic_file(index, fs=fs) as file:
        for part in (msgspec.json.encode(head) + b"\n", *(a.tobytes() for a in arrays), ids.blob):
            fs.write(file, part)
            checksum = crc64(part, checksum)
        fs.write(file, _SUM.pack(checksum))
