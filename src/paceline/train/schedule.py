"""The learning rate as a function of the share of samples consumed."""

import math


def cosine(progress: float, *, warmup: float, floor: float) -> float:
    """Factor on the peak rate.

    Driven by samples, not by steps, so it is the same for any batch size or number of workers.

    Args:
        progress: share of the run's samples consumed, 0 to 1.
        warmup: share over which the factor rises linearly to 1.
        floor: factor at the end of the cosine.

    """
    if progress < warmup:
        return progress / warmup
    along = (progress - warmup) / (1.0 - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(along, 1.0)))
