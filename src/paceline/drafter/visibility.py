"""What a slot of a draft block may attend to: one rule for every implementation of attention.

docs/algorithms.md, "Visibility". All functions broadcast over their integer tensor arguments.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visibility:
    """The mask of one layer."""

    causal: bool = False
    """Slot j sees slots up to j of its block, else all of them."""
    window: int | None = None
    """Positions that a slot sees, its own included; None is all of them."""

    def context(
        self, anchors: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Whether slots of blocks at anchors see context at positions of the same document."""
        seen = positions < anchors
        if self.window is not None:
            seen = seen & (anchors + slots - positions < self.window)
        return seen

    def block(self, slots: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Whether slots see other slots of their own block."""
        seen = others <= (slots if self.causal else others)
        if self.window is not None:
            seen = seen & ((slots - others).abs() < self.window)
        return seen


FULL = Visibility()
"""Everything before the anchor, and the whole block."""
