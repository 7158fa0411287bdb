"""Random ragged token batches for tests."""

from collections.abc import Sequence

import torch

from paceline.types import TokenBatch


def random_batch(lengths: Sequence[int], *, vocab: int = 256, seed: int = 0) -> TokenBatch:
    """Uniform ids below `vocab`; every second token is in the loss mask; ids `s0`, `s1`, ..."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return TokenBatch(
        input_ids=torch.randint(vocab, (total,), generator=generator),
        loss_mask=torch.arange(total) % 2 == 1,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
    )


def single(batch: TokenBatch, n: int) -> TokenBatch:
    """Sample n of a batch, alone."""
    span = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
    return TokenBatch(
        input_ids=batch.input_ids[span],
        loss_mask=batch.loss_mask[span],
        offsets=torch.tensor([0, span.stop - span.start]),
        sample_ids=(batch.sample_ids[n],),
    )
