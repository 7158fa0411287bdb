"""One request's state in the target: its cache, and the features that the drafter reads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from paceline.decode.verify import ancestor_mask
from paceline.durable.errors import TargetError
from paceline.target.cache_argument import cache_argument
from paceline.target.families import LayerKind
from paceline.target.load import Target
from paceline.types.tree import DraftTree


def require_gatherable_cache(target: Target) -> None:
    """Refuse, by name, targets whose cache cannot be gathered along an accepted path."""
    others = sorted({kind.value for kind in target.spec.layer_kinds if kind is not LayerKind.FULL})
    if others:
        raise TargetError(
            f"{target.spec.name}: speculative decoding here needs full-attention layers only; "
            f"this target also has {', '.join(others)} layers, whose state cannot be rolled back "
            "yet. Its hidden states can be extracted and trained on."
        )


class TargetSession:
    """Prefill once, then verify and commit round by round; batch size one."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        require_gatherable_cache(target)
        self._target = target
        self._taps = taps
        self._cache_argument = cache_argument(target.model)
        self.cache = DynamicCache()
        """Keys and values of the committed tokens, between `commit` and `verify`."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    def prefill(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Process the prompt. Returns logits fp32 [V] after it, and features [S, L, H]."""
        positions = torch.arange(len(ids))
        logits, taps = self._forward(torch.tensor(ids), positions, None, logits_to_keep=1)
        return logits[-1], taps

    def verify(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
        """Process a tree after the cached tokens.

        Returns logits fp32 [n, V] and features [n, L, H], a row per node. The cache holds all n
        rows until `commit`.
        """
        past, size = self.length, len(tree)
        positions = past + torch.tensor(tree.depths)
        mask = None
        if size > 1:
            mask = torch.zeros(size, past + size, dtype=self._target.model.dtype)
            own = mask[:, past:]
            own.masked_fill_(~ancestor_mask(tree), torch.finfo(mask.dtype).min)
        return self._forward(torch.tensor(tree.tokens), positions, mask, logits_to_keep=0)

    def commit(self, path: Sequence[int], verified: int) -> None:
        """Keep, of the `verified` rows that the last tree appended, those on `path`, in order."""
        past = self.length - verified
        in_order = list(path) == list(range(len(path)))
        for layer in self.cache.layers:
            if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
                raise TypeError(f"a cache layer of type {type(layer).__name__} cannot be gathered")
            if in_order:
                layer.keys = layer.keys[..., : past + len(path), :]
                layer.values = layer.values[..., : past + len(path), :]
                continue
            rows = [*range(past), *(past + node for node in path)]
            keep = torch.tensor(rows, device=layer.keys.device)
            layer.keys = layer.keys.index_select(-2, keep)
            layer.values = layer.values.index_select(-2, keep)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        logits_to_keep: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model = self._target.model
        device = model.device
        with torch.inference_mode(), self._captured() as captured:
            out = model(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                attention_mask=None if mask is None else mask[None, None].to(device),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: self.cache},
            )
        return out.logits[0].float(), torch.stack([captured[i] for i in self._taps], dim=1)

    @contextmanager
    def _captured(self) -> Iterator[dict[int, torch.Tensor]]:
        captured: dict[int, torch.Tensor] = {}
        layers: Any = self._target.decoder.layers

        def keep(layer_id: int):
            def hook(_module: object, _inputs: object, output: object) -> None:
                hidden: Any = output[0] if isinstance(output, tuple) else output
                captured[layer_id] = hidden[0]

            return hook

        handles = [layers[i].register_forward_hook(keep(i)) for i in self._taps]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()
