"""Bytes of the hidden states: of a token, a sample, a shard, in all, by codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.features.codec import Codec
from paceline.features.plan import Lengths, unit_bounds
from paceline.features.sizes import bytes_per_token, store_bytes, unit_bytes_bound
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.schema import ExtractRecipe
from paceline.target.taps import taps_of

CODECS: tuple[Codec, ...] = ("none", "planes", "int8o")

CORPUS_TOKEN_BYTES = 12
"""About what a token takes in a corpus file: its id in digits, and its part of the text."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples that an extraction captures."""

    count: int
    tokens: int
    longest: int
    """Tokens of the longest sample; the most that it may have where `basis` is not `corpus`."""
    basis: Literal["corpus", "data", "options"]
    """Counted in the run's corpus; estimated from the data; told by --rows and --mean-tokens."""
    said: str
    """The same in words, with what an estimate rests on."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample."""
        return self.tokens / self.count


@dataclass(frozen=True, kw_only=True)
class Done:
    """What earlier starts of the extraction have made and verified."""

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of those shards, after the codec."""


@dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """Bytes of the feature store."""

    codec: Codec
    """The recipe's, `auto` resolved."""
    taps: tuple[int, ...]
    last: bool
    dtype: str
    bytes_per_token: int
    """Hidden states alone, before the codec."""
    bytes_per_sample: int
    """Mean, before the codec."""
    shards: int
    largest_shard: int
    """Bytes that it never exceeds, however badly its states compress: what is reserved for it."""
    is_one_sample: bool
    """Whether the largest shard is a single sample of more than `extract.shard_bytes`."""
    by_codec: dict[Codec, int]
    """Bytes in all; of `planes` and `int8o` by ratios measured on a real target."""
    total: int
    """Those of `codec`."""


def store_sizes(
    recipe: ExtractRecipe,
    samples: Samples,
    lengths: Lengths | None,
    *,
    num_layers: int,
    hidden_size: int,
) -> StoreSizes:
    """What the hidden states of `samples` take, exactly where their `lengths` are known.

    Raises RecipeError for impossible taps.
    """
    taps = taps_of(recipe, num_layers)
    codec: Codec = next(c for c in CODECS if c == resolved_codec(recipe))
    token = bytes_per_token(len(taps), hidden_size, last=recipe.last, dtype=recipe.dtype)
    room = max(1, recipe.shard_bytes // token)
    if lengths is None:
        shards, largest = _estimated_shards(samples, room)
    else:
        shards, largest = _counted_shards(recipe, lengths, token)

    def in_all(codec: Codec) -> int:
        return store_bytes(
            tokens=samples.tokens,
            samples=samples.count,
            shards=shards,
            bytes_per_token=token,
            codec=codec,
            dtype=recipe.dtype,
        )

    by_codec: dict[Codec, int] = {
        c: in_all(c) for c in CODECS if c != "int8o" or recipe.dtype != "float32"
    }
    return StoreSizes(
        codec=codec,
        taps=taps,
        last=recipe.last,
        dtype=recipe.dtype,
        bytes_per_token=token,
        bytes_per_sample=round(samples.mean_tokens * token),
        shards=shards,
        largest_shard=max(
            unit_bytes_bound(
                tokens=tokens,
                samples=count,
                num_taps=len(taps),
                hidden_size=hidden_size,
                last=recipe.last,
                dtype=recipe.dtype,
                codec=codec,
            )
            for tokens, count in largest
        ),
        is_one_sample=max(tokens for tokens, _ in largest) > room,
        by_codec=by_codec,
        total=by_codec[codec],
    )


_Shard = tuple[int, int]
"""Tokens and samples."""


def _counted_shards(
    recipe: ExtractRecipe, lengths: Lengths, token: int
) -> tuple[int, Sequence[_Shard]]:
    """How many shards there are, and those that may be the largest.

    More tokens or more samples take more bytes: of none here has another one more of both.
    """
    bounds = unit_bounds(lengths, bytes_per_token=token, shard_bytes=recipe.shard_bytes)
    before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[bounds]
    sizes = list(zip(np.diff(before).tolist(), np.diff(bounds).tolist(), strict=True))
    largest: list[_Shard] = []
    for shard in sorted(set(sizes), reverse=True):
        if not largest or shard[1] > largest[-1][1]:
            largest.append(shard)
    return len(sizes), largest


def _estimated_shards(samples: Samples, room: int) -> tuple[int, Sequence[_Shard]]:
    """The same of samples that are known by their mean and their longest."""
    each = max(1, int(room / samples.mean_tokens))
    # A shard of short samples fills its room; one sample may be longer than that.
    fullest = min(room, samples.tokens), min(each, samples.count)
    return -(-samples.count // each), (fullest, (samples.longest, 1))
