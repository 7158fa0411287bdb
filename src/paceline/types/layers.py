from enum import StrEnum


class LayerConvention(StrEnum):
    """What a layer id in a file means; see docs/architecture.md, "Layer ids".

    Paceline itself knows `OUTPUT_AFTER_LAYER` alone; the others exist at the border to engines.
    """

    OUTPUT_AFTER_LAYER = "output_after_layer"
    """Id i is the residual stream after decoder layer i, 0-based (`hidden_states[i + 1]`)."""

    INPUT_OF_LAYER = "input_of_layer"
    """Id i is the residual stream before decoder layer i (`hidden_states[i]`)."""

    def to_own(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Translate ids of this convention into output-after-layer ids.

        Raises ValueError for an id that names the embedding output, which no layer puts out.
        """
        if self is LayerConvention.OUTPUT_AFTER_LAYER:
            return layer_ids
        if any(i < 1 for i in layer_ids):
            raise ValueError(f"layer ids {layer_ids} name the embedding, not a layer's output")
        return tuple(i - 1 for i in layer_ids)

    def from_own(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Translate output-after-layer ids into ids of this convention."""
        shift = 0 if self is LayerConvention.OUTPUT_AFTER_LAYER else 1
        return tuple(i + shift for i in layer_ids)
