"""How many bytes features take at rest. Pure arithmetic, for the plan and for `doctor`."""

from typing import Literal

RestDtype = Literal["float32", "bfloat16"]

_ITEM_BYTES: dict[RestDtype, int] = {"float32": 4, "bfloat16": 2}

_TOKEN_OVERHEAD = 4 + 1
"""Token id and loss mask."""

_SAMPLE_OVERHEAD = 8 + 32 + len('\\"\\",')
"""Offset, and the sample id as it stands in the header."""

_SHARD_OVERHEAD = 1024
"""The rest of the header."""


def bytes_per_token(num_taps: int, hidden_size: int, *, last: bool, dtype: RestDtype) -> int:
    """Bytes of one token's hidden states."""
    return (num_taps + last) * hidden_size * _ITEM_BYTES[dtype]


def store_bytes(*, tokens: int, samples: int, shards: int, bytes_per_token: int) -> int:
    """Bytes of a whole feature store; within 1 % of what the files turn out to be."""
    return (
        tokens * (bytes_per_token + _TOKEN_OVERHEAD)
        + samples * _SAMPLE_OVERHEAD
        + shards * _SHARD_OVERHEAD
    )
