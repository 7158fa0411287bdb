"""The learning rate as a function of the share of samples consumed."""

import math
from typing import Literal


def rate_factor(
    progress: float,
    *,
    schedule: Literal["cosine", "wsd"],
    warmup: float,
    decay: float,
    floor: float,
) -> float:
    """Factor on the peak rate; docs/algorithms.md, "Learning rate".

    Driven by samples, not by steps, so it is the same for any batch size or number of workers.

    Args:
        progress: share of the run's samples consumed, 0 to 1.
        schedule: `cosine` falls from the end of the warm-up on, `wsd` (warm-up, stable, decay)
            over the last `decay` alone, linearly.
        warmup: share over which the factor rises linearly to 1.
        decay: share over which `wsd` falls; at most 1 - warmup.
        floor: factor at the end.

    """
    if progress < warmup:
        return progress / warmup
    if schedule == "wsd":
        return floor + (1.0 - floor) * min(1.0, max(0.0, 1.0 - progress) / decay)
    along = (progress - warmup) / (1.0 - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(along, 1.0)))
