"""A batch in pieces: long samples pass through the target some tokens at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.durable.errors import TargetError
from paceline.target.families import LayerKind
from paceline.types import TokenBatch

_CACHE_LAYERS = {
    LayerKind.FULL: "DynamicLayer",
    LayerKind.SLIDING: "DynamicSlidingWindowLayer",
    LayerKind.LINEAR: "LinearAttentionLayer",
}
"""What Transformers keeps between two pieces for a layer of each kind that is known to go on from
a state when it gets several tokens. By name: a version may not have one of them."""


@dataclass(frozen=True)
class Piece:
    """The same columns of all samples that reach so far, right-padded to one rectangle."""

    ids: torch.Tensor
    """int64 [N, S]."""

    real: torch.Tensor | None
    """int64: flat indices of the tokens in `ids` that are no padding; None where all are real."""

    rows: torch.Tensor | None
    """int64: which tokens of the batch those are; None for all of them, in order."""

    keep: torch.Tensor | None
    """int64 [N]: which samples of the piece before go on here; None for all of them."""


def pieces_of(batch: TokenBatch, chunk_tokens: int | None) -> Iterator[Piece]:
    """Cut a batch into pieces of at most `chunk_tokens` columns; into one without a limit.

    A sample is only in the pieces that hold tokens of it: one that has ended would bring nothing
    but padding, over which a sliding layer has no key to look at.
    """
    lengths, starts = batch.offsets.diff(), batch.offsets[:-1]
    longest = int(lengths.max())
    step = longest if chunk_tokens is None else min(chunk_tokens, longest)
    before = torch.arange(len(lengths))
    for begin in range(0, longest, step):
        samples = (lengths > begin).nonzero().squeeze(1)
        columns = begin + torch.arange(min(step, longest - begin))
        is_real = columns < lengths[samples, None]
        rows = (starts[samples, None] + columns)[is_real]
        ids = torch.zeros(is_real.shape, dtype=torch.int64)
        ids[is_real] = batch.input_ids[rows]
        yield Piece(
            ids=ids,
            real=None if bool(is_real.all()) else is_real.flatten().nonzero().squeeze(1),
            rows=None if step == longest else rows,
            keep=None if len(samples) == len(before) else torch.searchsorted(before, samples),
        )
        before = samples


def new_cache(decoder: PreTrainedModel, kinds: Sequence[LayerKind], name: str) -> Any:
    """An empty cache that carries every layer of `decoder` from piece to piece.

    `kinds` are those of its layers, `name` the target's. Raises TargetError, naming the kind, for
    a layer whose state Transformers does not carry over.
    """
    cache: Any = DynamicCache(config=decoder.config)
    held = [type(layer).__name__ for layer in cache.layers]
    for number, kind in enumerate(kinds):
        found = held[number] if number < len(held) else "nothing"
        if found != _CACHE_LAYERS[kind]:
            raise TargetError(
                f"extract.chunk_tokens: layer {number} of {name} is of kind {kind.value}, for "
                f"which this version of Transformers keeps {found} between two pieces, not "
                f"{_CACHE_LAYERS[kind]}. Set extract.chunk_tokens to null."
            )
    return cache
