"""Draft trees: what is drafted for one round, and how large it may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TreeShape:
    """How large a draft tree may become."""

    budget: int
    """Nodes without the root; the target's pass has one row more."""

    width: int | None = None
    """Children that one node may have, the best ones; 1 makes a chain. None: as many as it pays."""

    depth: int | None = None
    """Deepest level, at most what the drafter drafts. None: all of that."""

    def __post_init__(self) -> None:
        for name in ("budget", "width", "depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"a draft tree needs a {name} of 1 or more, not {value}")

    @property
    def ranks(self) -> int:
        """Tokens per depth that such a tree can hold at most."""
        return self.budget if self.width is None else min(self.budget, self.width)

    def levels(self, drafted: int) -> int:
        """Levels that such a tree can have where `drafted` of them are there."""
        return min(self.budget, drafted, drafted if self.depth is None else self.depth)


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
        for node, parent in enumerate(self.parents):
            if not 0 <= parent < node and node:
                raise ValueError("DraftTree: parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, root: int, drafted: Sequence[int]) -> "DraftTree":
        """A tree of width one."""
        return cls(tokens=(root, *drafted), parents=tuple(range(-1, len(drafted))))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> Mapping[tuple[int, int], int]:
        """(parent, token) to node; of equal siblings the first."""
        # From the last node to the first, so that of equal siblings the first one stays.
        nodes = range(len(self) - 1, 0, -1)
        pairs = zip(self.parents[:0:-1], self.tokens[:0:-1], strict=True)
        return dict(zip(pairs, nodes, strict=True))
