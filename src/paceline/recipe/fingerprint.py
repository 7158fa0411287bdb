"""Fingerprints: a hash of everything that determines an artefact's content."""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import crc64_file, crc64_hex
from paceline.durable.errors import DataError

Fields = dict[str, Any]
"""Dotted names to JSON scalars; what a fingerprint is made of and a refusal's diff shows."""


def flatten(value: Any, prefix: str = "") -> Fields:
    """Turn nested dataclasses, dicts and sequences into dotted names with JSON scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: Fields = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def fingerprint(fields: Fields) -> str:
    """32 hex digits over the fields, independent of their order."""
    canonical = msgspec.json.encode(fields, order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:32]


def digest_file(path: Path) -> str:
    """CRC64NVME and size of a file. Raises DataError where there is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path in the recipe.")
    return f"{crc64_hex(crc64_file(path))}-{path.stat().st_size}"


def _in_words(key: str) -> str:
    """A checksum's name alone does not say that it is somebody's file that was edited."""
    is_file = re.fullmatch(r"sources\.\d+\.content", key)
    return f"{key} (the data file itself has changed)" if is_file else key


def difference(made: Fields, asked: Fields) -> list[str]:
    """One line per field that differs, `name: made -> asked`."""
    missing = "(absent)"
    return [
        f"{_in_words(key)}: {made.get(key, missing)!r} -> {asked.get(key, missing)!r}"
        for key in sorted(made.keys() | asked.keys())
        if made.get(key, missing) != asked.get(key, missing)
    ]
