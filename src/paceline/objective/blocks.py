"""Labels, validity and weights of draft blocks; docs/algorithms.md, "Training step"."""

import hashlib

import numpy as np
import torch


def valid_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions a of one document with loss_mask[a] and loss_mask[a + 1]; int64, rising.

    Args:
        loss_mask: bool [S].

    """
    if loss_mask.numel() < 2:
        return torch.empty(0, dtype=torch.int64)
    return torch.nonzero(loss_mask[:-1] & loss_mask[1:]).flatten()


def sample_anchors(
    loss_mask: torch.Tensor, count: int, *, seed: int, epoch: int, sample_id: str
) -> torch.Tensor:
    """At most `count` valid anchors, uniformly without replacement, rising; int64.

    The draw depends on seed, epoch and sample id alone: neither batch-mates, nor the number of
    workers, nor a resume changes it.
    """
    candidates = valid_anchors(loss_mask)
    if candidates.numel() <= count:
        return candidates
    key = hashlib.sha256(f"{seed}/{epoch}/{sample_id}".encode()).digest()[:16]
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(candidates.numel())
    chosen = np.sort(np.argsort(draws, kind="stable")[:count])
    return candidates[torch.from_numpy(chosen)]


def block_targets(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and validity of the drafted slots of one document's blocks.

    Slot k predicts the token at position anchor + k. Validity ends at the first position that
    is not supervised: what follows a turn's end was not written by the target.

    Args:
        input_ids: int64 [S].
        loss_mask: bool [S].
        anchors: int64 [A].
        block_size: B, the anchor's slot included.

    Returns:
        int64 [A, B - 1] and bool [A, B - 1], for slots 1..B-1.

    """
    positions = anchors[:, None] + torch.arange(1, block_size, device=anchors.device)
    inside = positions < input_ids.numel()
    positions = positions.clamp_max(input_ids.numel() - 1)
    valid = (inside & loss_mask[positions]).cumprod(dim=1).bool()
    return input_ids[positions], valid


def decay_weights(block_size: int, gamma: float) -> torch.Tensor:
    """fp32 [B - 1]: exp(-(k - 1) / gamma) for slots k = 1..B-1 (DFlash, section 3.3)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)
