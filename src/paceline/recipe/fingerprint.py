"""Fingerprints: a hash of everything that determines an artefact's content."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import Around, crc64_file, crc64_hex
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


def digest_file(path: Path, *, around: Around = nullcontext) -> str:
    """CRC64NVME and size of a file. Raises DataError where there is none."""
    with around():
        if not path.is_file():
            raise DataError(f"{path}: no such file. Check the path in the recipe.")
        size = path.stat().st_size
    return f"{crc64_hex(crc64_file(path, around=around))}-{size}"


def _in_words(key: str) -> str:
    """Names that say nothing of the key, or of the file, that somebody has changed, say it too."""
    if key == "extract.samples":
        return f"{key} (train.online decides)"
    is_file = re.fullmatch(r"(sources|vocab_text)\.\d+\.content|warm_start\.\w+", key)
    return f"{key} (the data file itself has changed)" if is_file else key


ABSENT = "(absent)"
"""Stands for the value of a field that one side lacks."""


def changed_fields(made: Fields, asked: Fields) -> list[str]:
    """Names of the fields that differ, sorted; as a fingerprint does, tells 1 from 1.0."""
    return [
        key
        for key in sorted(made.keys() | asked.keys())
        if msgspec.json.encode(made.get(key, ABSENT)) != msgspec.json.encode(asked.get(key, ABSENT))
    ]


def difference(made: Fields, asked: Fields) -> list[str]:
    """One line per field that differs, `name: made -> asked`."""
    return [
        f"{_in_words(key)}: {made.get(key, ABSENT)!r} -> {asked.get(key, ABSENT)!r}"
        for key in changed_fields(made, asked)
    ]


def keys_of(fields: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Those of `keys` that are a field, or a list or mapping whose entry is one."""
    fields = list(fields)
    return [key for key in keys if any(f == key or f.startswith(f"{key}.") for f in fields)]
