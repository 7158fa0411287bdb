"""The unit plan: which samples share a shard, and which a forward pass. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Lengths = Sequence[int] | npt.NDArray[np.integer]
"""Tokens per sample."""


@dataclass(frozen=True)
class Unit:
    """A slice of the corpus that becomes one shard; done or redone as a whole."""

    index: int
    start: int
    """First sample."""

    stop: int
    """One behind the last sample."""

    batches: tuple[tuple[int, ...], ...]
    """Samples of each forward pass, longest first, the longest batch first."""

    @property
    def key(self) -> str:
        """The object's name in the store."""
        return unit_key(self.index)

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples in the order of the shard's rows: by falling length, then by position.

        The order depends on the lengths alone, so the shard's content does not depend on how
        many tokens a forward pass may hold.
        """
        return tuple(sample for batch in self.batches for sample in batch)


def unit_key(index: int) -> str:
    """`unit-000123.safetensors`."""
    return f"unit-{index:06d}.safetensors"


def tee_key(index: int) -> str:
    """`tee-000123.safetensors`: of samples kept while they were trained on, outside of any plan."""
    return f"tee-{index:06d}.safetensors"


def plan_units(
    lengths: Lengths, *, bytes_per_token: int, shard_bytes: int, batch_tokens: int
) -> tuple[Unit, ...]:
    """Cut the corpus into units and batches.

    A unit is the longest run of samples of at most `shard_bytes` (one sample where that alone is
    more). A batch holds samples of similar length: as padded to its longest it is at most
    `batch_tokens` tokens (or one sample). Every sample is in exactly one unit and one batch.
    Raises ValueError for a length below 1.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    bounds = unit_bounds(lengths, bytes_per_token=bytes_per_token, shard_bytes=shard_bytes)
    return tuple(
        Unit(index, start, stop, tuple(_batches(tokens[start:stop], start, batch_tokens)))
        for index, (start, stop) in enumerate(pairwise(bounds))
    )


def unit_bounds(lengths: Lengths, *, bytes_per_token: int, shard_bytes: int) -> list[int]:
    """Where `plan_units` cuts: the first sample of each unit, and one behind the last of all.

    Raises ValueError for a length below 1.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes_per_token {bytes_per_token} is not positive")
    tokens = np.asarray(lengths, dtype=np.int64)
    if len(tokens) and int(tokens.min()) < 1:
        raise ValueError("a sample without tokens cannot be planned")
    return [0, *_cuts(tokens, shard_bytes // bytes_per_token)]


def _cuts(lengths: npt.NDArray[np.int64], unit_tokens: int) -> Iterator[int]:
    ends = np.cumsum(lengths)
    stop, before = 0, 0
    while stop < len(lengths):
        fitting = int(np.searchsorted(ends, before + unit_tokens, side="right"))
        stop = max(stop + 1, fitting)
        before = int(ends[stop - 1])
        yield stop


def _batches(
    lengths: npt.NDArray[np.int64], start: int, batch_tokens: int
) -> Iterator[tuple[int, ...]]:
    """Batches of a unit whose first sample is `start`."""
    order = np.argsort(-lengths, kind="stable")
    samples, sizes = (order + start).tolist(), lengths[order].tolist()
    at = 0
    while at < len(samples):
        # The first of a batch is its longest: all others are padded to it.
        end = at + max(1, batch_tokens // sizes[at])
        yield tuple(samples[at:end])
        at = end
