"""What travels between the parts: token batches, features, draft trees, losses, conventions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.types.batch import Features, TokenBatch
    from paceline.types.layers import LayerConvention
    from paceline.types.loss import Loss
    from paceline.types.sample import Sample, Split

__all__ = ["Features", "LayerConvention", "Loss", "Sample", "Split", "TokenBatch"]


def __getattr__(name: str) -> Any:
    """A name when it is first asked for: those that hold no tensors do not load torch."""
    match name:
        case "Features" | "TokenBatch":
            module = "batch"
        case "Sample" | "Split":
            module = "sample"
        case "LayerConvention":
            module = "layers"
        case "Loss":
            module = "loss"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
