"""The unit plan: which samples share a shard, and which a forward pass. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


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


def plan_units(
    lengths: Sequence[int], *, bytes_per_token: int, shard_bytes: int, batch_tokens: int
) -> tuple[Unit, ...]:
    """Cut the corpus into units and batches.

    `lengths` are tokens per sample. A unit is the longest run of samples of at most
    `shard_bytes` (one sample where that alone is more). A batch holds samples of similar length:
    as padded to its longest it is at most `batch_tokens` tokens (or one sample). Every sample is
    in exactly one unit and one batch. Raises ValueError for a length below 1.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes_per_token {bytes_per_token} is not positive")
    if any(length < 1 for length in lengths):
        raise ValueError("a sample without tokens cannot be planned")
    bounds = [0, *_cuts(lengths, shard_bytes // bytes_per_token)]
    return tuple(
        Unit(index, start, stop, tuple(_batches(lengths, start, stop, batch_tokens)))
        for index, (start, stop) in enumerate(pairwise(bounds))
    )


def _cuts(lengths: Sequence[int], unit_tokens: int) -> Iterator[int]:
    tokens = 0
    for sample, length in enumerate(lengths):
        if tokens and tokens + length > unit_tokens:
            yield sample
            tokens = 0
        tokens += length
    if tokens:
        yield len(lengths)


def _batches(
    lengths: Sequence[int], start: int, stop: int, batch_tokens: int
) -> Iterator[tuple[int, ...]]:
    batch: list[int] = []
    for sample in sorted(range(start, stop), key=lambda s: (-lengths[s], s)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield tuple(batch)
            batch = []
        batch.append(sample)
    if batch:
        yield tuple(batch)
