"""The learning rate as a function of the share of samples consumed."""

import math
from typing import Literal

from paceline.durable.errors import RecipeError
from paceline.recipe.schema import TrainRecipe


def rate_factor(
    progress: float,
    *,
    schedule: Literal["cosine", "wsd", "linear", "constant"],
    warmup: float,
    decay: float,
    floor: float,
) -> float:
    """Factor on the peak rate; docs/algorithms.md, "Learning rate".

    Driven by samples, not by steps, so it is the same for any batch size or number of workers.

    Args:
        progress: share of the run's samples consumed, 0 to 1.
        schedule: `cosine` and `linear` fall from the end of the warm-up on, `wsd` (warm-up, stable,
            decay) over the last `decay` alone, linearly; `constant` stays.
        warmup: share over which the factor rises linearly to 1.
        decay: share over which `wsd` falls; at most 1 - warmup.
        floor: factor at the end; `constant` has none.

    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return floor + (1.0 - floor) * min(1.0, max(0.0, 1.0 - progress) / decay)
    along = min((progress - warmup) / (1.0 - warmup), 1.0)
    left = 1.0 - along if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * along))
    return floor + (1.0 - floor) * left


def warmup_share(recipe: TrainRecipe, total: int) -> float:
    """Share of the run's `total` samples over which the rate rises.

    A step is `batch_samples` samples, for any number of drafters. Raises RecipeError where
    `warmup_steps` leave no room for the rest of the run.
    """
    if recipe.warmup_steps is None:
        return recipe.warmup_ratio
    share = recipe.warmup_steps * recipe.batch_samples / total
    room = 1.0 - recipe.decay_ratio if recipe.schedule == "wsd" else 1.0
    # Sums of decimal fractions are off by a last digit.
    if share >= 1.0 or share > room + 1e-9:
        steps = -(-total // recipe.batch_samples)
        decay = f", of which train.decay_ratio {recipe.decay_ratio} falls" if room < 1.0 else ""
        raise RecipeError(
            f"train.warmup_steps: {recipe.warmup_steps} do not fit into the run: it has {steps} "
            f"steps{decay}. Lower it."
        )
    return share
