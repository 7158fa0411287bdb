"""Rotary position embedding in the target's own kind (default, llama3, yarn, ...)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from paceline.drafter.config import DrafterConfig


class Rope(nn.Module):
    """Turns queries and keys by absolute positions, in fp32."""

    inverse_frequencies: torch.Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        inverse, self._scale = _frequencies(config)
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow the module to another device, not to another type: positions would be rounded."""
        frequencies = self.inverse_frequencies
        super()._apply(fn, recurse)
        self.inverse_frequencies = frequencies.to(self.inverse_frequencies.device)
        return self

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin, fp32 [..., 1, head_dim], for positions [...]; one table for all heads."""
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the tables to x [..., heads, head_dim], halves paired as in Llama and Qwen."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def _frequencies(config: DrafterConfig) -> tuple[torch.Tensor, float]:
    kind = config.rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        return 1.0 / (float(config.rope["rope_theta"]) ** exponents), 1.0
    # Rare, and a second of every worker's start.
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    described: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rope_parameters": dict(config.rope),
    }
    initialise = ROPE_INIT_FUNCTIONS[kind]
    inverse, scale = initialise(PretrainedConfig(**described), torch.device("cpu"))
    return inverse.float(), float(scale)
