"""Random features for tests that need shards and no target."""

from collections.abc import Sequence

import torch

from paceline.types import Features, TokenBatch


def random_features(
    lengths: Sequence[int],
    *,
    layer_ids: tuple[int, ...] = (1, 3),
    hidden: int = 8,
    last: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Features:
    """Features of samples with `lengths`, every tensor a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return Features(
        tokens=TokenBatch(
            input_ids=torch.randint(0, 50_000, (total,), generator=generator),
            loss_mask=torch.rand(total, generator=generator) < 0.5,
            offsets=torch.tensor([0, *lengths]).cumsum(0),
            sample_ids=tuple(f"{seed:016x}{n:016x}" for n in range(len(lengths))),
        ),
        taps=torch.randn(total, len(layer_ids), hidden, generator=generator).to(dtype),
        last=torch.randn(total, hidden, generator=generator).to(dtype) if last else None,
        layer_ids=layer_ids,
    )


def assert_same(found: Features, wanted: Features) -> None:
    """Equal in every bit, dtype and shape included."""
    assert found.tokens.sample_ids == wanted.tokens.sample_ids
    assert found.layer_ids == wanted.layer_ids
    pairs = [
        (found.tokens.input_ids, wanted.tokens.input_ids),
        (found.tokens.loss_mask, wanted.tokens.loss_mask),
        (found.tokens.offsets, wanted.tokens.offsets),
        (found.taps, wanted.taps),
    ]
    assert (found.last is None) == (wanted.last is None)
    if found.last is not None and wanted.last is not None:
        pairs.append((found.last, wanted.last))
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def sample_of(features: Features, n: int) -> Features:
    """Sample n alone."""
    start, end = features.tokens.offsets[n : n + 2].tolist()
    return Features(
        tokens=TokenBatch(
            input_ids=features.tokens.input_ids[start:end],
            loss_mask=features.tokens.loss_mask[start:end],
            offsets=torch.tensor([0, end - start]),
            sample_ids=features.tokens.sample_ids[n : n + 1],
        ),
        taps=features.taps[start:end],
        last=None if features.last is None else features.last[start:end],
        layer_ids=features.layer_ids,
    )
