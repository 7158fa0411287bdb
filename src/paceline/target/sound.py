"""Whether what a target gave for a batch is that batch's, and made of numbers."""

import torch

from paceline.durable.errors import TargetError
from paceline.types import Features, TokenBatch


def require_sound(found: Features, batch: TokenBatch, compute_type: str) -> None:
    """Raise TargetError for other token ids than asked for, and for states that are not finite.

    The latter names the sample; `compute_type` is the target's, for what to do about it.
    """
    if not torch.equal(found.tokens.input_ids, batch.input_ids):
        raise TargetError(
            f"the target processed other token ids than it was given, in a batch that begins "
            f"with sample {batch.sample_ids[0]}."
        )
    for states in (found.taps, found.last):
        if states is not None:
            _require_finite(states, batch, compute_type)


def _require_finite(states: torch.Tensor, batch: TokenBatch, compute_type: str) -> None:
    # A sum is infinite or no number where a term is, and costs a tenth of looking at each.
    if bool(torch.isfinite(states.sum())):
        return
    good = torch.isfinite(states).flatten(1).all(dim=1)
    if bool(good.all()):
        return
    token = int(good.logical_not().nonzero()[0])
    sample = int(torch.searchsorted(batch.offsets, token, right=True)) - 1
    raise TargetError(
        f"sample {batch.sample_ids[sample]}: the target's hidden states are not finite in "
        f"{compute_type}. Set target.dtype to a type of wider range, or leave the sample out of "
        "the corpus."
    )
