"""What travels between the parts: token batches, features, draft trees, losses, conventions."""

from paceline.types.batch import Features, TokenBatch
from paceline.types.layers import LayerConvention
from paceline.types.loss import Loss
from paceline.types.sample import Sample, Split

__all__ = ["Features", "LayerConvention", "Loss", "Sample", "Split", "TokenBatch"]
