"""How the slots of a block weigh, and the two losses of whole blocks; docs/algorithms.md.

All of it lives on grids [A, D]: a row per block, a column per drafted slot. `log_own` is the
drafter's log-probability of the label, minus infinity where it cannot propose it.
"""

import torch
from torch.nn.functional import logsigmoid

IMPOSSIBLE = -80.0
"""Stands in sums for the log-probability of a token that is not proposed: e^-80 is nothing beside
any other, and infinity cannot be subtracted."""


def streak_weights(
    log_own: torch.Tensor, counted: torch.Tensor, valid: torch.Tensor, alpha: float
) -> torch.Tensor:
    """D-PACE (arXiv 2605.18810), detached: w_j = sum over m >= j of prod over i <= m of s_i.

    Args:
        log_own: [A, D].
        counted: bool [A, D], slots with a loss.
        valid: bool [A, D], slots that the answer has; the others are passed for sure.
        alpha: smoothing, s = (1 - alpha) q + alpha.

    Returns:
        [A, D], 0 behind the last slot that counts.

    """
    return _coverage_weights(log_own.detach().exp(), counted, valid, alpha)


def tree_weights(
    log_own: torch.Tensor,
    threshold: torch.Tensor,
    counted: torch.Tensor,
    valid: torch.Tensor,
    *,
    alpha: float,
    softness: float,
) -> torch.Tensor:
    """As `streak_weights`, with the chance that a prefix in the draft tree stays in it for q."""
    inside = logsigmoid(_margins(log_own.detach(), threshold, valid, softness))
    before = torch.nn.functional.pad(inside[:, :-1], (1, 0))
    return _coverage_weights((inside - before).exp(), counted, valid, alpha)


def tree_losses(
    log_own: torch.Tensor, threshold: torch.Tensor, valid: torch.Tensor, softness: float
) -> torch.Tensor:
    """[A]: the share of the block's D depths at which the answer is outside the draft tree, softly.

    Differentiable towards `log_own`; 1 minus it, times D, is the accepted depth in a whole block.
    """
    outside = torch.sigmoid(-_margins(log_own, threshold, valid, softness))
    return (outside * valid).sum(dim=1) / valid.shape[1]


def length_losses(acceptance: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[A]: 1 - (1 / D) sum over j of prod over i <= j of alpha_i; alpha is 1 where not valid.

    Differentiable towards `acceptance` [A, D].
    """
    passed = torch.where(valid, acceptance, 1.0).cumprod(dim=1)
    return 1.0 - passed.mean(dim=1)


def tree_threshold(log_probs: torch.Tensor, budget: int) -> torch.Tensor:
    """[A]: the score of the last prefix in a draft tree of `budget` nodes; detached.

    That tree holds the prefixes of highest product of marginals (DDTree). Those of it that are d
    long are among the `budget` best of their length, and a prefix made of the i-th best and the
    j-th best next token has i * j others before it: so few candidates a depth are enough. Minus
    infinity where there are not as many prefixes.

    Args:
        log_probs: [A, D, K] log-probabilities of the best tokens of each depth, falling; minus
            infinity at depths that are not to be drafted.
        budget: nodes without the root.

    """
    log_probs = log_probs.detach()
    depth, width = log_probs.shape[1:]
    ranks = torch.arange(budget, device=log_probs.device)
    ahead = (ranks[:, None] + 1) * (ranks[:width] + 1) <= budget
    prefix, token = ahead.nonzero(as_tuple=True)
    best = log_probs.new_zeros((log_probs.shape[0], 1))
    found = []
    for level in range(depth):
        # As many as there are, at the first depths of a small vocabulary.
        known = prefix < best.shape[1]
        candidates = best[:, prefix[known]] + log_probs[:, level, token[known]]
        best = candidates.topk(min(budget, candidates.shape[1]), dim=1).values
        found.append(best)
    scores = torch.cat(found, dim=1)
    if scores.shape[1] < budget:
        return scores.new_full((scores.shape[0],), -torch.inf)
    return scores.topk(budget, dim=1).values[:, -1]


def _coverage_weights(
    passing: torch.Tensor, counted: torch.Tensor, valid: torch.Tensor, alpha: float
) -> torch.Tensor:
    smoothed = torch.where(valid, (1.0 - alpha) * passing + alpha, 1.0)
    reached = smoothed.cumprod(dim=1) * counted
    return reached.flip(1).cumsum(dim=1).flip(1)


def _margins(
    log_own: torch.Tensor, threshold: torch.Tensor, valid: torch.Tensor, softness: float
) -> torch.Tensor:
    scores = torch.where(valid, log_own.clamp_min(IMPOSSIBLE), 0.0).cumsum(dim=1)
    return (scores - threshold[:, None]) / softness
