"""Noise on the features that a drafter is trained on; docs/algorithms.md, "Feature noise"."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.recipe.schema import TrainRecipe


@dataclass(frozen=True, kw_only=True)
class FeatureNoise:
    """The noise of one step."""

    kind: Literal["uniform", "normal"]
    level: float
    """`uniform` lies within plus and minus this, `normal` has it as its standard deviation."""
    seed: int

    def add_to(self, taps: torch.Tensor, *, epoch: int, sample_id: str) -> None:
        """Add a sample's noise to its taps [T, L, H], in place and in their type.

        The draw depends on seed, epoch and sample id alone: neither batch-mates, nor the number of
        drafters, nor a resume changes it. Generators of another kind of device draw other numbers.
        """
        key = hashlib.sha256(f"noise/{self.seed}/{epoch}/{sample_id}".encode()).digest()[:8]
        generator = torch.Generator(taps.device).manual_seed(int.from_bytes(key, "little"))
        noise = torch.empty_like(taps)
        if self.kind == "uniform":
            noise.uniform_(-self.level, self.level, generator=generator)
        else:
            noise.normal_(0.0, self.level, generator=generator)
        taps.add_(noise)


def feature_noise(recipe: TrainRecipe, progress: float) -> FeatureNoise | None:
    """The noise of a step at this share of the run's samples, 0 to 1; None where there is none.

    Its level goes from `noise_start` to `noise_end` along half a period of a cosine.
    """
    if recipe.noise == "none":
        return None
    left = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    level = recipe.noise_end + (recipe.noise_start - recipe.noise_end) * left
    return FeatureNoise(kind=recipe.noise, level=level, seed=recipe.seed)
