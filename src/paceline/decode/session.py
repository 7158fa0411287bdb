"""The target's side of decoding: what it has of each request, whatever its layers are."""

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.decode.attention_state import AttentionState
from paceline.decode.recurrent_state import RecurrentState
from paceline.target.families import LayerKind
from paceline.target.load import Target
from paceline.types.tree import DraftTree


class TargetSession(Protocol):
    """Prefill once, then verify and commit round by round, B requests side by side."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each request."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Process the prompts. Returns, for each, logits fp32 [V] after it, features [S, L, H]."""
        ...

    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Process a tree for each request. Returns logits fp32 [n, V] for each, a row per node."""
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Keep, of the last trees, the nodes on these paths; returns their features [n, L, H]."""
        ...

    def keep(self, requests: Sequence[int]) -> None:
        """Drop all other requests."""
        ...


def open_session(target: Target, taps: tuple[int, ...], requests: int = 1) -> TargetSession:
    """A session for as many requests; `taps` are the layers whose outputs the drafter reads.

    Every kind of layer in LayerKind can be decoded; a target with another is refused by its
    `config.json`, when it is read.
    """
    is_recurrent = LayerKind.LINEAR in target.spec.layer_kinds
    state = RecurrentState if is_recurrent else AttentionState
    return state(target, taps, requests)
