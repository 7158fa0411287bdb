"""The one verifier: which drafted tokens the target would have produced itself.

A chain is a tree of width one, so there is no second code path; docs/algorithms.md,
"Verification".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.types.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """The outcome of one verification."""

    path: tuple[int, ...]
    """Nodes from the root to the deepest accepted one."""
    tokens: tuple[int, ...]
    """What is committed: the accepted drafted tokens, then the target's own next token."""

    @property
    def depth(self) -> int:
        """Accepted drafted tokens."""
        return len(self.path) - 1


def ancestor_mask(tree: DraftTree) -> torch.Tensor:
    """Visibility, bool [n, n]: row i sees column j iff j is i or an ancestor of i."""
    size = len(tree)
    visible = torch.zeros(size, size, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    return visible


def walk(tree: DraftTree, choose: Callable[[int], int]) -> Accepted:
    """Follow the target's own choices down the tree as far as they were drafted.

    Args:
        tree: what was drafted.
        choose: of a node, the token that the target puts after it: its argmax, or a draw that the
            tree knew nothing of. Asked along the path alone, which gives the law that asking
            everywhere gives. Every emitted token is one of these, which is why the output is the
            target's whatever the drafter proposed.

    """
    children = tree.children
    node, path, tokens = 0, [0], []
    token = choose(0)
    while (child := children.get((node, token))) is not None:
        tokens.append(token)
        path.append(child)
        node = child
        token = choose(node)
    return Accepted(path=tuple(path), tokens=(*tokens, token))
