"""The model families that are supported, and what their config.json leaves unsaid."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Config = dict[str, Any]
"""The text part of a config.json."""


class NormKind(StrEnum):
    """How an RMSNorm applies its weight."""

    WEIGHT = "weight"
    """x̂ · w, multiplied in the compute type (Llama)."""
    ONE_PLUS_WEIGHT = "one_plus_weight"
    """x̂ · (1 + w), multiplied in fp32 (Qwen3.5, Qwen3-Next)."""


class LayerKind(StrEnum):
    """How a decoder layer mixes positions; the values are those of Transformers."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of one `model_type` share; defaults for keys that config.json omits."""

    norm: NormKind = NormKind.WEIGHT
    head_dim: int | None = None
    """None: hidden size over heads."""
    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    linear_interval: int | None = None
    """Every n-th layer attends fully, the others are linear; None: none is linear."""

    slides: bool = False
    """Whether `sliding_window` holds where `use_sliding_window` is absent."""
    full_layers: int = 0
    """`max_window_layers` where absent: layers before it do not slide."""

    def sliding_window(self, config: Config) -> int | None:
        """Tokens that a sliding layer sees; None where no layer slides."""
        if not config.get("use_sliding_window", self.slides):
            return None
        return config.get("sliding_window")

    def layer_kinds(self, config: Config) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order. Raises ValueError for a kind not in LayerKind."""
        if config.get("layer_types"):
            return tuple(LayerKind(kind) for kind in config["layer_types"])
        layers = range(config["num_hidden_layers"])
        if self.linear_interval is not None:
            every = config.get("full_attention_interval", self.linear_interval)
            return tuple(LayerKind.LINEAR if (i + 1) % every else LayerKind.FULL for i in layers)
        if self.sliding_window(config) is None:
            return tuple(LayerKind.FULL for _ in layers)
        first = config.get("max_window_layers", self.full_layers)
        return tuple(LayerKind.SLIDING if i >= first else LayerKind.FULL for i in layers)


_QWEN_HYBRID = Family(
    norm=NormKind.ONE_PLUS_WEIGHT, head_dim=256, partial_rotary_factor=0.25, linear_interval=4
)

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(slides=True),
    "qwen2": Family(full_layers=28),
    "qwen3": Family(head_dim=128, full_layers=28),
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_next": _QWEN_HYBRID,
    "smollm3": Family(rope_theta=2000000.0, tie_word_embeddings=True),
}
"""By the `model_type` of config.json; a new family of the same build is a line here."""
