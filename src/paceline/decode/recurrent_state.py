"""Targets with recurrent layers: a state cannot be taken back, so it is only moved on for good.

A tree is verified as its paths from root to leaf, each a row of a batch that starts from a copy of
the state; padding stands behind a path, where nothing reads it. What is accepted is then processed
once more, from the state itself. Requests are processed one after the other.
"""

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from paceline.decode.forward import Forward
from paceline.target.load import Target
from paceline.types.tree import DraftTree

_PATHS = 8
"""Rows of a pass: what bounds the logits that exist at a time."""


class RecurrentState:
    """States, keys and values of B requests."""

    def __init__(self, target: Target, taps: tuple[int, ...], requests: int) -> None:
        self._forward = Forward(target, taps)
        config = target.model.config
        self._device = target.model.device
        self._requests = [_Request(DynamicCache(config=config)) for _ in range(requests)]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each request."""
        return [request.length for request in self._requests]

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Process the prompts. Returns, for each, logits fp32 [V] after it, features [S, L, H]."""
        found = [
            self._advance(request, prompt)
            for request, prompt in zip(self._requests, prompts, strict=True)
        ]
        return [logits for logits, _ in found], [features for _, features in found]

    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Process a tree for each request. Returns logits fp32 [n, V] for each, a row per node."""
        return [
            self._verify(request, tree) for request, tree in zip(self._requests, trees, strict=True)
        ]

    def commit(self, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Keep, of the last trees, the nodes on these paths; returns their features [n, L, H]."""
        return [
            self._commit(request, path) for request, path in zip(self._requests, paths, strict=True)
        ]

    def keep(self, requests: Sequence[int]) -> None:
        """Drop all other requests."""
        self._requests = [self._requests[request] for request in requests]

    def _advance(
        self, request: "_Request", ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(request.length, request.length + len(ids))
        logits, features = self._forward(
            torch.tensor(ids)[None], positions[None], request.cache, logits_to_keep=1
        )
        request.length += len(ids)
        return logits[0, -1], features[0]

    def _verify(self, request: "_Request", tree: DraftTree) -> torch.Tensor:
        request.tree = tree
        if len(tree) == 1:
            # Nothing of it can be rejected.
            logits, request.features = self._advance(request, tree.tokens)
            return logits[None]
        rows: list[torch.Tensor | None] = [None] * len(tree)
        paths = _paths(tree)
        for start in range(0, len(paths), _PATHS):
            part = paths[start : start + _PATHS]
            logits = self._run_paths(request, tree, part)
            for place, path in enumerate(part):
                for depth, node in enumerate(path):
                    if rows[node] is None:
                        rows[node] = logits[place, depth]
        return torch.stack([row for row in rows if row is not None])

    def _run_paths(
        self, request: "_Request", tree: DraftTree, paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        width = max(len(path) for path in paths)
        ids = torch.zeros(len(paths), width, dtype=torch.int64)
        for place, path in enumerate(paths):
            ids[place, : len(path)] = torch.tensor([tree.tokens[node] for node in path])
        positions = torch.arange(request.length, request.length + width).expand(len(paths), -1)
        cache = copy.deepcopy(request.cache)
        origin = torch.zeros(len(paths), dtype=torch.int64, device=self._device)
        cache.reorder_cache(origin)  # pyright: ignore[reportArgumentType]
        logits, _ = self._forward(ids, positions, cache)
        return logits

    def _commit(self, request: "_Request", path: Sequence[int]) -> torch.Tensor:
        tree, features = request.tree, request.features
        if tree is None:
            raise ValueError("commit before verify: there is nothing to be kept")
        request.tree = request.features = None
        if features is not None:
            return features
        return self._advance(request, [tree.tokens[node] for node in path])[1]


class _Request:
    """One request's cache, and what it is in the middle of."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.length = 0
        self.tree: DraftTree | None = None
        self.features: torch.Tensor | None = None
        """Of a root alone, which is processed for good when it is verified."""


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """From the root to each leaf."""
    inner = set(tree.parents)
    found = []
    for leaf in range(len(tree)):
        if leaf not in inner:
            path = [leaf]
            while tree.parents[path[-1]] >= 0:
                path.append(tree.parents[path[-1]])
            found.append(tuple(reversed(path)))
    return found
