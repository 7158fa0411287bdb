"""The self-describing config of a drafter: all that has to be true again when it is served."""

from dataclasses import dataclass, field
from typing import Any

from paceline.drafter.visibility import Visibility
from paceline.durable.errors import RecipeError
from paceline.types.layers import LayerConvention


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and provenance of a drafter."""

    algorithm: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """`rope_parameters` as Transformers 5 writes them: rope_type, rope_theta and the scaling's."""
    max_position: int
    vocab_size: int
    """Rows of the target's embedding and lm_head, padding included."""
    draft_vocab_size: int | None = None
    """Tokens that are proposed; which, the weights' file says. None: all of `vocab_size`."""
    block_size: int
    """Slots of a block, the anchor's included."""
    mask_token_id: int
    taps: tuple[int, ...]
    """Tapped target layers in `layer_convention`, rising."""
    in_block_mask: str = "bidirectional"
    """Of layers of full attention: `bidirectional`, or `causal`."""
    layer_types: tuple[str, ...] = ()
    """`full` or `sliding` for each layer; empty where all are full."""
    sliding_window: int = 2048
    """Positions that a slot of a sliding layer sees, its own included."""
    sliding_in_block_mask: str = "causal"
    """Of sliding layers: `bidirectional`, or `causal`."""
    layer_convention: str = LayerConvention.OUTPUT_AFTER_LAYER.value
    target_name: str = ""
    target_identity: str = ""
    """Hash of the target's weights and config; a drafter is refused beside another target."""
    target_num_layers: int = 0
    template_digest: str = ""
    """Hash of the chat template that rendered the training data."""
    template_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise RecipeError(
                f"drafter.block_size: {self.block_size} leaves nothing to draft; use 2 or more."
            )
        if self.num_heads % self.num_kv_heads:
            raise RecipeError(
                f"drafter: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise RecipeError(
                f"drafter.layer_types: {len(self.layer_types)} types for {self.num_layers} layers. "
                "Give one for each layer."
            )

    def visibility(self, layer: int) -> Visibility:
        """What the slots of a layer see."""
        if self.layer_types and self.layer_types[layer] == "sliding":
            return Visibility(self.sliding_in_block_mask == "causal", self.sliding_window)
        return Visibility(self.in_block_mask == "causal")
