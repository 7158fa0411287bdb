"""The manifest: what a feature store holds. Published last, when every unit is verified."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.durable.errors import DataError, IntegrityError
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.types import LayerConvention

FORMAT_VERSION = 1

FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class UnitEntry:
    """One shard and its samples in the order of its rows."""

    key: str
    size: int
    """Bytes of the file."""

    crc64: str
    """CRC64NVME of the file, 16 hex digits."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens per sample."""

    loss_tokens: tuple[int, ...]
    """Trainable tokens per sample."""

    def __post_init__(self) -> None:
        if not len(self.sample_ids) == len(self.lengths) == len(self.loss_tokens):
            raise ValueError(f"{self.key}: ids, lengths and loss_tokens do not agree")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reader has to know before it opens a shard."""

    fingerprint: str
    """Of the extraction; stands in every shard's header too."""

    target_identity: str
    hidden_size: int
    layer_ids: tuple[int, ...]
    layer_convention: LayerConvention
    last: bool
    """Whether what lm_head multiplies (after the final norm) is kept."""

    dtype: str
    """Type at rest, `bfloat16` or `float32`."""

    units: tuple[UnitEntry, ...]
    version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """The manifest hash, 32 hex digits: over contents, checksums and order of the shards."""
        return _digest(_encode(self))


@dataclass(frozen=True)
class _File:
    digest: str
    manifest: msgspec.Raw


def publish(folder: Path, manifest: Manifest, *, fs: FileSystem = REAL_FS) -> Path:
    """Write `folder`/manifest.json durably and atomically; return its path."""
    body = _encode(manifest)
    path = folder / FILE_NAME
    write_atomic(path, msgspec.json.encode(_File(_digest(body), msgspec.Raw(body))), fs=fs)
    return path


def load(folder: Path) -> Manifest:
    """Read and check `folder`/manifest.json.

    Raises DataError where there is none, IntegrityError where it is damaged or of another
    format version.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(f"{path}: no such file. Run `paceline extract` to its end first.")
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        whole = _digest(bytes(file.manifest)) == file.digest
        manifest = msgspec.json.decode(file.manifest, type=Manifest) if whole else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path) from error
    if manifest is None:
        raise _damaged(path)
    if manifest.version != FORMAT_VERSION:
        raise IntegrityError(
            f"{path}: format version {manifest.version}, this Paceline reads {FORMAT_VERSION}. "
            "Extract again into a new run directory."
        )
    return manifest


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="deterministic")


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path}: the manifest was damaged after it was written. Run `paceline extract` again: it "
        "checks every shard and publishes the manifest anew."
    )
