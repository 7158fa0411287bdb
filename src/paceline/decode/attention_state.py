"""Targets of attention layers: a tree is one row of tokens, told apart by its mask."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from paceline.decode.forward import Forward
from paceline.decode.rooms import Columns, RoomLayer
from paceline.decode.verify import ancestor_mask
from paceline.target.families import LayerKind
from paceline.target.load import Target
from paceline.types.tree import DraftTree


class AttentionState:
    """Keys and values of B requests; verifying leaves rows that `commit` keeps or gives up."""

    def __init__(self, target: Target, taps: tuple[int, ...], requests: int) -> None:
        model, spec = target.model, target.spec
        self._forward = Forward(target, taps)
        self._kinds = tuple(dict.fromkeys(spec.layer_kinds))
        self._window = spec.sliding_window
        self._dtype, self._device = model.dtype, model.device
        self._columns = Columns(requests)
        self.layers = [RoomLayer(self._columns) for _ in spec.layer_kinds]
        self._cache = DynamicCache()
        self._cache.layers.extend(self.layers)
        self._features: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each request."""
        return list(self._columns.starts)

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Process the prompts. Returns, for each, logits fp32 [V] after it, features [S, L, H]."""
        lengths = [len(prompt) for prompt in prompts]
        # On the right: no token sees what comes after it, and what is there is written over.
        ids = _padded(prompts)
        positions = torch.arange(ids.shape[1]).expand(len(prompts), -1)
        ends = sorted({length - 1 for length in lengths})
        logits, features = self._forward(
            ids, positions, self._cache, logits_to_keep=torch.tensor(ends, device=self._device)
        )
        self._columns.starts = lengths
        return (
            [row[ends.index(n - 1)] for row, n in zip(logits, lengths, strict=True)],
            [row[:n] for row, n in zip(features, lengths, strict=True)],
        )

    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Process a tree for each request. Returns logits fp32 [n, V] for each, a row per node."""
        ids = _padded([tree.tokens for tree in trees])
        starts = torch.tensor(self._columns.starts)
        depths = _padded([tree.depths for tree in trees])
        positions = starts[:, None] + depths
        masks = None if self._sees_all(ids.shape) else self._masks(trees, positions)
        logits, self._features = self._forward(ids, positions, self._cache, masks)
        return [row[: len(tree)] for row, tree in zip(logits, trees, strict=True)]

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Keep, of the last trees, the nodes on these paths; returns their features [n, L, H]."""
        if self._features is None:
            raise ValueError("commit before verify: there is nothing to be kept")
        features = []
        for request, path in enumerate(paths):
            rows = torch.tensor(path, device=self._features.device)
            features.append(self._features[request].index_select(0, rows))
            # A path rises, so without a gap it lies where it belongs.
            if path[-1] >= len(path):
                rows += self._columns.starts[request]
                for layer in self.layers:
                    layer.gather(request, rows)
        self._columns.starts = [
            start + len(path) for start, path in zip(self._columns.starts, paths, strict=True)
        ]
        self._features = None
        return features

    @torch.inference_mode()
    def keep(self, requests: Sequence[int]) -> None:
        """Drop all other requests."""
        index = torch.tensor(requests, device=self._device)
        for layer in self.layers:
            layer.reorder_cache(index)
        self._columns.starts = [self._columns.starts[request] for request in requests]

    def _sees_all(self, shape: torch.Size) -> bool:
        """Whether the new token of a single request may see every column."""
        return tuple(shape) == (1, 1) and self._kinds == (LayerKind.FULL,)

    def _masks(
        self, trees: Sequence[DraftTree], positions: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Additive masks [B, 1, n, columns]; rows of padding see what is committed."""
        starts = torch.tensor(self._columns.starts)
        columns = self._columns.end(positions.shape[1])
        held = torch.arange(columns).expand(len(trees), -1)
        visible = (held < starts[:, None])[:, None].repeat(1, positions.shape[1], 1)
        # Of a column its token's position: in a tree, that of its depth.
        held = held.clone()
        for request, tree in enumerate(trees):
            start, size = self._columns.starts[request], len(tree)
            visible[request, :size, start : start + size] = ancestor_mask(tree)
            held[request, start : start + size] = positions[request, :size]
        found = {}
        for kind in self._kinds:
            seen = visible
            if kind is LayerKind.SLIDING and self._window is not None:
                near = held[:, None] > positions[:, :, None] - self._window
                seen = visible & near
            mask = torch.zeros(seen.shape, dtype=self._dtype)
            mask.masked_fill_(~seen, torch.finfo(self._dtype).min)
            found[kind.value] = mask[:, None].to(self._device)
        return found


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows as int64 [B, longest], zeros behind the shorter ones."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
