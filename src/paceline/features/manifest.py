"""The manifest: what a feature store holds. Published last, when every unit is verified."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import DataError, IntegrityError
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.features.codec import Codec
from paceline.types.layers import LayerConvention

FORMAT_VERSION = 2

FILE_NAME = "manifest.json"

_CONTENT_VERSION = 1
"""Of what `Manifest.digest` is taken over. Checkpoints name that digest, so it never changes."""


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
class QuarantinedUnit:
    """A shard that could not be made; its samples are in no other one."""

    key: str
    reason: str
    sample_ids: tuple[str, ...]


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
    codec: Codec = "none"
    """How the hidden states are coded."""

    store: str = ""
    """URL of the store that holds the shards; empty for the manifest's own folder."""

    quarantined: tuple[QuarantinedUnit, ...] = ()
    version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """The manifest hash, 32 hex digits: over contents, checksums and order of the shards.

        Where they are kept, and in which version the manifest is written, is no part of it.
        """
        content = _Content(
            fingerprint=self.fingerprint,
            target_identity=self.target_identity,
            hidden_size=self.hidden_size,
            layer_ids=self.layer_ids,
            layer_convention=self.layer_convention,
            last=self.last,
            dtype=self.dtype,
            units=self.units,
        )
        return _digest(_json(content))


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What the digest covers; fields and their order are those of format version 1."""

    fingerprint: str
    target_identity: str
    hidden_size: int
    layer_ids: tuple[int, ...]
    layer_convention: LayerConvention
    last: bool
    dtype: str
    units: tuple[UnitEntry, ...]
    version: int = _CONTENT_VERSION


@dataclass(frozen=True)
class _File:
    digest: str
    """Over the bytes of `manifest`."""

    manifest: msgspec.Raw


@dataclass(frozen=True)
class _Version:
    version: int


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest file."""
    body = _json(manifest)
    return msgspec.json.encode(_File(_digest(body), msgspec.Raw(body)))


def decode(data: bytes, where: str) -> Manifest:
    """A manifest from the bytes of its file, of this or an earlier version.

    `where` names it in errors. Raises IntegrityError where it is damaged or of a later version.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
        if _digest(bytes(file.manifest)) != file.digest:
            raise _damaged(where)
        version = msgspec.json.decode(file.manifest, type=_Version).version
        if version == FORMAT_VERSION:
            return msgspec.json.decode(file.manifest, type=Manifest)
        if version not in _MIGRATIONS:
            raise IntegrityError(
                f"{where}: format version {version}, this Paceline reads 1 to {FORMAT_VERSION}. "
                "Use the version that wrote it, or extract again into a new run directory."
            )
        document = msgspec.json.decode(file.manifest)
        for step in range(version, FORMAT_VERSION):
            document = _MIGRATIONS[step](document)
        return msgspec.convert(document, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(where) from error


def publish(folder: Path, manifest: Manifest, *, fs: FileSystem = REAL_FS) -> Path:
    """Write `folder`/manifest.json durably and atomically; return its path."""
    path = folder / FILE_NAME
    write_atomic(path, encode(manifest), fs=fs)
    return path


def load(folder: Path) -> Manifest:
    """Read and check `folder`/manifest.json.

    Raises DataError where there is none, IntegrityError where it is damaged or of a later
    format version.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(f"{path}: no such file. Run `paceline extract` to its end first.")
    return decode(path.read_bytes(), str(path))


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no codec and no other place than its own folder."""
    return {**document, "codec": "none", "store": "", "quarantined": [], "version": 2}


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""Version to what makes the next one of it."""


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def _damaged(where: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: the manifest was damaged after it was written. Run `paceline extract` again: it "
        "checks every shard and publishes the manifest anew."
    )
