"""DDTree (arXiv 2604.12989): the draft tree of the M most probable prefixes."""

import heapq
from collections.abc import Sequence

import torch

from paceline.types.tree import DraftTree


def top_log_probs(
    logits: torch.Tensor, width: int, d2t: torch.Tensor | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """The `width` best tokens of each row with their log-probabilities over all that are proposed.

    Args:
        logits: fp32 [D, V], row d for depth d + 1.
        width: tokens a row, cut to V.
        d2t: int64 [V] offsets from a column to its target id, of a drafter whose vocabulary is
            reduced; None where columns are target ids.

    Returns:
        Target ids and log-probabilities [D][width], falling; equal ones by token id.

    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    values, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    order = values.argsort(dim=-1, descending=True, stable=True)
    log_probs = values.gather(-1, order) - normaliser
    ids = ids.gather(-1, order)
    return (ids if d2t is None else ids + d2t[ids]).tolist(), log_probs.tolist()


def build_tree(
    root: int, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], budget: int
) -> DraftTree:
    """The `budget` prefixes of highest product of marginals (section 3, propositions 1 and 2).

    A heap holds, for every prefix already taken, its first child and its next sibling; all
    steps lower the score, so prefixes leave it in falling order and parents before children.
    The tree of a smaller budget is therefore the beginning of that of a larger one. Ties are
    broken by the prefix's ranks.

    Args:
        root: the committed token that the drafted ones follow.
        tokens: [D][K] tokens of each depth by falling probability.
        log_probs: [D][K] their log-probabilities.
        budget: nodes without the root, at least 1.

    """
    if budget < 1:
        raise ValueError(f"a draft tree needs a budget of 1 or more, not {budget}")
    node_tokens, parents = [root], [-1]
    depth_limit = len(tokens)
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if depth_limit:
        heap.append((-log_probs[0][0], (0,), 0))
    while heap and len(node_tokens) <= budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        node_tokens.append(tokens[depth][rank])
        parents.append(parent)
        if rank + 1 < len(tokens[depth]):
            step = log_probs[depth][rank] - log_probs[depth][rank + 1]
            heapq.heappush(heap, (cost + step, (*ranks[:-1], rank + 1), parent))
        if depth + 1 < depth_limit:
            first = -log_probs[depth + 1][0]
            heapq.heappush(heap, (cost + first, (*ranks, 0), len(node_tokens) - 1))
    return DraftTree(tokens=tuple(node_tokens), parents=tuple(parents))
