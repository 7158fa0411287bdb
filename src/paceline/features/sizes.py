"""How many bytes features take at rest. Pure arithmetic, for the plan and for `doctor`."""

from typing import Literal

from paceline.features.codec import Codec, group_count, outlier_count
from paceline.features.frames import frame_rows

RestDtype = Literal["float32", "bfloat16"]

_ITEM_BYTES: dict[RestDtype, int] = {"float32": 4, "bfloat16": 2}

_RATIOS: dict[RestDtype, dict[Codec, float]] = {
    "bfloat16": {"none": 1.0, "planes": 0.67, "int8o": 0.48},
    "float32": {"none": 1.0, "planes": 0.84, "int8o": 0.24},
}

_TOKEN_OVERHEAD = 4 + 1
"""Token id and loss mask."""

_SAMPLE_OVERHEAD = 8 + 32 + len('\\"\\",')
"""Offset, and the sample id as it stands in the header."""

_SHARD_OVERHEAD = 1024
"""The rest of the header."""

_MOST_SHARD_OVERHEAD = 8192
"""The same for a bound: hundreds of taps, long fingerprints."""


def bytes_per_token(num_taps: int, hidden_size: int, *, last: bool, dtype: RestDtype) -> int:
    """Bytes of one token's hidden states, without a codec."""
    return (num_taps + last) * hidden_size * _ITEM_BYTES[dtype]


def codec_ratio(codec: Codec, dtype: RestDtype = "bfloat16") -> float:
    """Bytes that a codec makes of one byte of hidden states, for estimates.

    For bfloat16 measured on SmolLM2-135M (`make bench ONLY=codec_sizes`), on rows that no other
    sample shares; a chat template's prefix, which is stored once a shard, makes it less. Of
    float32 the exponent shrinks as much, and the longer mantissa not at all.
    """
    return _RATIOS[dtype][codec]


def store_bytes(
    *,
    tokens: int,
    samples: int,
    shards: int,
    bytes_per_token: int,
    codec: Codec = "none",
    dtype: RestDtype = "bfloat16",
) -> int:
    """Bytes of a whole feature store; without a codec within 1 % of what the files will be."""
    return (
        tokens * (round(bytes_per_token * codec_ratio(codec, dtype)) + _TOKEN_OVERHEAD)
        + samples * _SAMPLE_OVERHEAD
        + shards * _SHARD_OVERHEAD
    )


def unit_bytes_bound(
    *,
    tokens: int,
    samples: int,
    num_taps: int,
    hidden_size: int,
    last: bool,
    dtype: RestDtype,
    codec: Codec,
    id_bytes: int = 32,
) -> int:
    """Bytes that a unit's shard never exceeds, however badly its states compress.

    For reservations. `id_bytes` are those of the longest sample id.
    """
    slots, item = num_taps + last, _ITEM_BYTES[dtype]
    row = slots * hidden_size * item
    planes, fixed = item, slots * hidden_size
    if codec == "int8o":
        kept, groups = outlier_count(hidden_size), group_count(hidden_size)
        planes, fixed = 5, slots * (groups + kept + 4 * kept)
        coded_row = slots * (hidden_size - kept + 2 * groups + 2 * kept)
    else:
        coded_row = row
    # A piece that would grow is kept as it is; each frame adds the ends of its pieces.
    frames = tokens // frame_rows(row) + samples
    index = 0 if codec == "none" else frames * planes * 8 + fixed
    header = _MOST_SHARD_OVERHEAD + samples * (8 + id_bytes + 5)
    return tokens * (coded_row + _TOKEN_OVERHEAD) + index + header
