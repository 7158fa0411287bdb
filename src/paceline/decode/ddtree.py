"""DDTree (arXiv 2604.12989): the draft tree of the M most probable prefixes."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.decode.rows import sum_exp, top_columns
from paceline.types.tree import DraftTree, TreeShape

Children = tuple[Sequence[int], Sequence[float]]
"""Tokens with their log-probabilities, by falling probability; equal ones by token id."""


class Scorer(Protocol):
    """What a drafter says may follow a prefix; its last token is all that may matter of it."""

    @property
    def depth(self) -> int:
        """Levels that are drafted."""
        ...

    def children(self, depth: int, parent_token: int) -> Children:
        """What may stand at level `depth` (1 to `self.depth`) after `parent_token`.

        At level 1 that is the root's token. The log-probabilities must be at most 0 and fall; how
        many there are is the scorer's affair, `TreeShape.ranks` are enough. Asked once for each
        node that is taken, so an answer that costs something should be kept.
        """
        ...


@dataclass(frozen=True)
class MarginalScorer:
    """Depths independent of each other, as one pass of DFlash gives them."""

    tokens: Sequence[Sequence[int]]
    """[D][K] tokens of each depth by falling probability."""
    log_probs: Sequence[Sequence[float]]
    """[D][K]."""

    @property
    def depth(self) -> int:
        """D."""
        return len(self.tokens)

    def children(self, depth: int, parent_token: int) -> Children:  # noqa: ARG002
        """The same after any token."""
        return self.tokens[depth - 1], self.log_probs[depth - 1]


def best_first(root: int, scorer: Scorer, shape: TreeShape) -> DraftTree:
    """The `shape.budget` prefixes of highest probability, in falling order.

    The cost of a prefix is its parent's, less its own token's log-probability (fp64, from the root
    on). Ties go to the prefix whose parent was taken earlier, then to the lower rank: among equal
    siblings, to the lower token id.

    A heap holds, for every prefix already taken, its first child and its next sibling. Both cost at
    least as much and come later in a tie, so prefixes leave the heap in exactly this order, parents
    before children, also where the score depends on the parent's token. The tree of a smaller
    budget is the beginning of that of a larger one.

    Raises ValueError where the scorer's log-probabilities rise or are above 0.
    """
    levels = shape.levels(scorer.depth)
    width = shape.ranks
    tokens, parents = [root], [-1]
    heap: list[tuple[float, int, int]] = []
    """Cost, parent and rank: what orders prefixes."""
    families: list[tuple[Sequence[int], Sequence[float], float, int]] = []
    """By node: its children, their log-probabilities, its own cost, and the children's level."""
    cost, token, level = 0.0, root, 1
    while True:
        # The node taken last, or the root, gets its children; the heap, the best one of them.
        if level <= levels:
            found, log_probs = scorer.children(level, token)
            families.append((found, log_probs, cost, level))
            if found:
                heapq.heappush(heap, (cost - log_probs[0], len(families) - 1, 0))
        else:
            families.append(((), (), cost, level))
        if not heap:
            break
        least, parent, rank = heap[0]
        found, log_probs, base, level = families[parent]
        if least < cost:
            raise ValueError(
                f"log-probabilities at depth {level} rise or are above 0: "
                f"{log_probs[rank]} at rank {rank}"
            )
        cost, token = least, found[rank]
        tokens.append(token)
        parents.append(parent)
        if len(tokens) > shape.budget:
            break
        rank += 1
        if rank < width and rank < len(found):
            heapq.heapreplace(heap, (base - log_probs[rank], parent, rank))
        else:
            heapq.heappop(heap)
        level += 1
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


def build_tree(
    root: int,
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    shape: TreeShape | int,
) -> DraftTree:
    """The prefixes of highest product of marginals (section 3, propositions 1 and 2).

    Args:
        root: the committed token that the drafted ones follow.
        tokens: [D][K] tokens of each depth by falling probability.
        log_probs: [D][K] their log-probabilities.
        shape: nodes without the root, and the caps on width and depth, if any.

    """
    shape = TreeShape(shape) if isinstance(shape, int) else shape
    return best_first(root, MarginalScorer(tokens, log_probs), shape)


def draft_tree(
    root: int,
    logits: torch.Tensor,
    shape: TreeShape | int,
    *,
    d2t: torch.Tensor | None = None,
    temperatures: Sequence[float] | None = None,
) -> DraftTree:
    """The tree of a drafter's logits fp32 [D, V]; the rest as in `top_log_probs`."""
    shape = TreeShape(shape) if isinstance(shape, int) else shape
    levels = shape.levels(logits.shape[0])
    if temperatures is not None:
        check_temperatures(temperatures, logits.shape[0])
        temperatures = temperatures[:levels]
    return build_tree(root, *top_log_probs(logits[:levels], shape.ranks, d2t, temperatures), shape)


def top_log_probs(
    logits: torch.Tensor,
    width: int,
    d2t: torch.Tensor | None = None,
    temperatures: Sequence[float] | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """The `width` best tokens of each row with their log-probabilities over all that are proposed.

    Args:
        logits: fp32 [D, V], row d for depth d + 1.
        width: tokens a row, cut to V.
        d2t: int64 [V] offsets from a column to its target id, of a drafter whose vocabulary is
            reduced; None where columns are target ids.
        temperatures: D numbers that the rows are divided by; None for 1 everywhere. They change
            no order: what rounding makes equal stays in the order of the logits.

    Returns:
        Target ids and log-probabilities [D][width], falling; equal ones by token id.

    """
    values, ids = top_columns(logits, min(width, logits.shape[-1]))
    if temperatures is not None:
        check_temperatures(temperatures, logits.shape[0])
        rows = torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
        logits, values = logits / rows, values / rows
    peaks = values[:, :1]
    log_probs = (values - peaks) - sum_exp(logits - peaks).log_()
    return (ids if d2t is None else ids + d2t[ids]).tolist(), log_probs.tolist()


def check_temperatures(temperatures: Sequence[float], depths: int) -> None:
    """Raise ValueError unless there is one finite temperature above 0 for each depth."""
    if len(temperatures) != depths:
        raise ValueError(f"{len(temperatures)} temperatures for {depths} depths")
    if not all(0 < value < math.inf for value in temperatures):
        raise ValueError(f"temperatures must be finite and above 0, not {list(temperatures)}")
