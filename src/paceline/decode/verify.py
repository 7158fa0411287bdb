"""The one verifier: which drafted tokens the target would have produced itself.

A chain is a tree of width one, so there is no second code path; docs/algorithms.md,
"Verification".
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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
    # A row is an integer with bit j for column j, until all rows are unpacked at once: an
    # operation on tensors for each node would take longer than building the tree.
    rows = [1]
    for node, parent in enumerate(tree.parents[1:], start=1):
        rows.append(rows[parent] | 1 << node)
    size = len(rows)
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join([row.to_bytes(width, "little") for row in rows]), np.uint8)
    bits = np.unpackbits(packed.reshape(size, width), axis=1, count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


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
