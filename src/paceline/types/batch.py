from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBatch:
    """Ragged token sequences, concatenated; nothing is padded."""

    input_ids: torch.Tensor
    """int64 [T], T the sum of the lengths."""

    loss_mask: torch.Tensor
    """bool [T]; true on tokens that the target generated (its answers with their end token)."""

    offsets: torch.Tensor
    """int64 [N + 1]; sample n is the slice offsets[n]:offsets[n + 1]."""

    sample_ids: tuple[str, ...]
    """N ids, hexadecimal."""

    def __post_init__(self) -> None:
        total = int(self.offsets[-1])
        if not (
            total == self.input_ids.numel() == self.loss_mask.numel()
            and self.offsets.numel() == len(self.sample_ids) + 1
        ):
            raise ValueError("TokenBatch: offsets, ids, mask and sample_ids do not agree")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return (self.offsets[1:] - self.offsets[:-1]).tolist()


@dataclass(frozen=True)
class Features:
    """The target's hidden states for a TokenBatch, with the ids that were really processed."""

    tokens: TokenBatch
    taps: torch.Tensor
    """[T, L, H]: the residual stream after each tapped decoder layer, in rising layer order."""

    last: torch.Tensor | None
    """[T, H]: what lm_head multiplies (after the final norm), or None where not asked for."""

    layer_ids: tuple[int, ...]
    """L layer ids, always `LayerConvention.OUTPUT_AFTER_LAYER`."""

    def __post_init__(self) -> None:
        t = self.tokens.input_ids.numel()
        if self.taps.shape[:2] != (t, len(self.layer_ids)):
            raise ValueError(
                f"Features: taps {tuple(self.taps.shape)} do not fit {t} tokens and "
                f"layers {self.layer_ids}"
            )
        if self.last is not None and self.last.shape[0] != t:
            raise ValueError(f"Features: last has {self.last.shape[0]} rows for {t} tokens")

    @property
    def num_bytes(self) -> int:
        """Bytes held by taps and last."""
        return self.taps.nbytes + (0 if self.last is None else self.last.nbytes)
