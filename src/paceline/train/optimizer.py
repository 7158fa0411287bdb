"""The optimizer, and the two settings that change while it runs."""

import torch

from paceline.drafter.dflash import DFlash
from paceline.recipe.schema import TrainRecipe


def build_optimizer(drafter: DFlash, recipe: TrainRecipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, never on norms."""
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
