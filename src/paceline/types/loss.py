from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Loss:
    """A loss as sum and count, so that any split of the same tokens gives the same mean."""

    sum: torch.Tensor
    """Scalar fp32 with gradient: the weighted sum over the positions that count."""

    count: float
    """The sum of the weights, the denominator of the mean."""

    parts: dict[str, float] = field(default_factory=dict)
    """Detached sums for the log, each with its own count under `<name>_count`."""
