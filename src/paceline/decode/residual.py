"""Chains whose tokens are drawn from the drafter: the acceptance rule of Leviathan et al.

A drafted x ~ q is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced
by a draw from norm(max(0, p - q)), and one token more comes from p where all are accepted
(arXiv 2211.17192, algorithm 1). q is the distribution that was really drawn from, filters
included. Tokens are distributed as the target's, but are not the very tokens that plain decoding
would draw.

The length of a chain is fixed before anything is drawn, so nothing depends on a token that is
judged later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.decode.sampling import PositionKeyedNoise, Sampling, Stream, distribution, race
from paceline.decode.verify import Accepted


@dataclass(frozen=True)
class Drawn:
    """A token drawn from the drafter, and what it was drawn from."""

    token: int
    ids: np.ndarray
    """Rising target ids [n] of the tokens that could have been drawn."""
    probabilities: np.ndarray
    """float64 [n], sum 1."""

    @property
    def probability(self) -> float:
        """The token's share of q."""
        return float(self.probabilities[np.searchsorted(self.ids, self.token)])


def draw_chain(
    slot_logits: torch.Tensor,
    to_target: Callable[[torch.Tensor], torch.Tensor],
    sampling: Sampling,
    noise: PositionKeyedNoise,
    first: int,
) -> list[Drawn]:
    """Draw a token from each row of `slot_logits` fp32 [D, K], the first for position `first`.

    `to_target` translates columns to target ids, of which it keeps the order.
    """
    drawn = []
    for depth, row in enumerate(slot_logits):
        position = first + depth
        columns, weights = distribution(row, position, sampling)
        ids = to_target(torch.from_numpy(columns).to(row.device)).cpu().numpy()
        token = race(ids, weights, noise, position, Stream.DRAFT)
        drawn.append(Drawn(token, ids, weights))
    return drawn


def accept_chain(
    drawn: Sequence[Drawn],
    logits: torch.Tensor,
    sampling: Sampling,
    noise: PositionKeyedNoise,
    first: int,
) -> Accepted:
    """Judge a drawn chain by the target's logits fp32 [D + 1, V], row 0 after the root."""
    tokens: list[int] = []
    for depth, draft in enumerate(drawn):
        position = first + depth
        ids, weights = distribution(logits[depth], position, sampling)
        place = int(np.searchsorted(ids, draft.token))
        is_kept = place < len(ids) and ids[place] == draft.token
        p = float(weights[place]) if is_kept else 0.0
        if noise.uniform(position, Stream.ACCEPT) * draft.probability < p:
            tokens.append(draft.token)
            continue
        return _accepted(tokens, race(*_residual(ids, weights, draft), noise, position))
    position = first + len(drawn)
    last = race(*distribution(logits[len(drawn)], position, sampling), noise, position)
    return _accepted(tokens, last)


def _residual(ids: np.ndarray, p: np.ndarray, draft: Drawn) -> tuple[np.ndarray, np.ndarray]:
    place = np.searchsorted(draft.ids, ids).clip(max=len(draft.ids) - 1)
    q = np.where(draft.ids[place] == ids, draft.probabilities[place], 0.0)
    rest = np.maximum(p - q, 0.0)
    # Where p = q but for rounding nothing is rejected but for rounding, and any rule serves.
    return (ids, rest) if rest.any() else (ids, p)


def _accepted(tokens: list[int], last: int) -> Accepted:
    return Accepted(path=tuple(range(len(tokens) + 1)), tokens=(*tokens, last))
