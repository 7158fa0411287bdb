"""The header of a safetensors file: names, shapes, and how long the file has to be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import TargetError

_LIMIT = 100 << 20
"""Bytes; safetensors itself takes no longer header."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    shapes: dict[str, tuple[int, ...]]
    size: int
    """Bytes that the whole file must have."""


def read_header(file: Path) -> Header:
    """Read the header alone. Raises TargetError for a file that has none."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LIMIT:
                raise ValueError(f"a header of {length} bytes")
            tensors = msgspec.json.decode(stream.read(length), type=dict[str, dict[str, Any]])
        tensors.pop("__metadata__", None)
        shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
        raise TargetError(f"{file}: not a safetensors file ({error}). Fetch it again.") from error
    return Header(shapes, 8 + length + end)
