"""One pass of a target over new tokens, with what the tapped layers put out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from paceline.target.cache_argument import cache_argument
from paceline.target.load import Target

Masks = Mapping[str, torch.Tensor | None]
"""By kind of layer, additive [B, 1, n, columns] in the model's type; None: plainly causal."""


class Forward:
    """Runs a target; knows how it wants to be called."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self._target = target
        self._taps = taps
        self._cache_argument = cache_argument(target.model)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
        masks: Masks | None = None,
        *,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Process ids int64 [B, n] at positions int64 [B, n] behind what the cache holds.

        Logits are formed for the last `logits_to_keep` places, for those that it lists, int64 [k],
        or, where it is 0, for all. Returns them, fp32 [B, n or k, V], and features [B, n, L, H].
        """
        model = self._target.model
        with torch.inference_mode(), self._captured() as captured:
            out = model(
                input_ids=ids.to(model.device),
                position_ids=positions.to(model.device),
                attention_mask=_argument(masks),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: cache},
            )
        return out.logits.float(), torch.stack([captured[i] for i in self._taps], dim=2)

    @contextmanager
    def _captured(self) -> Iterator[dict[int, torch.Tensor]]:
        captured: dict[int, torch.Tensor] = {}
        layers: Any = self._target.decoder.layers

        def keep(layer_id: int):
            def hook(_module: object, _inputs: object, output: object) -> None:
                hidden: Any = output[0] if isinstance(output, tuple) else output
                captured[layer_id] = hidden

            return hook

        handles = [layers[i].register_forward_hook(keep(i)) for i in self._taps]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def _argument(masks: Masks | None) -> Any:
    """One mask where all layers are of one kind; not every model takes a mask for each."""
    if masks is None:
        return None
    return next(iter(masks.values())) if len(masks) == 1 else dict(masks)
