from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftTree:
    """Drafted continuations of one committed token, as a tree; a chain is a tree of width one.

    Node 0 is the root: the token that is committed but not yet in the target's cache. Parents
    come before their children. The budget of a tree is its number of nodes without the root.
    """

    tokens: tuple[int, ...]
    """Token of each node, the root's first."""

    parents: tuple[int, ...]
    """Index of each node's parent; -1 for the root."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens or self.parents[0] != -1:
            raise ValueError("DraftTree: one parent per token, and the root (parent -1) first")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents[1:], start=1)):
            raise ValueError("DraftTree: parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, root: int, drafted: Sequence[int]) -> "DraftTree":
        """A tree of width one."""
        return cls(tokens=(root, *drafted), parents=tuple(range(-1, len(drafted))))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return tuple(depths)

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) to node; of equal siblings the first."""
        found: dict[tuple[int, int], int] = {}
        for node, parent in enumerate(self.parents[1:], start=1):
            found.setdefault((parent, self.tokens[node]), node)
        return found
