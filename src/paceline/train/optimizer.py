"""The optimizer, and the setting that changes while it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.drafter.dflash import DFlash
from paceline.recipe.schema import TrainRecipe


def build_optimizer(drafter: DFlash, recipe: TrainRecipe) -> torch.optim.Optimizer:
    """AdamW, or Muon for matrices and AdamW for the rest; docs/algorithms.md, "Optimizer".

    Weight decay is on matrices only, never on norms or biases.
    """
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    matrices: dict[str, Any] = {
        "params": [p for p in trainable if p.ndim >= 2],
        "weight_decay": recipe.weight_decay,
        "learning_rate_ratio": 1.0,
    }
    others: dict[str, Any] = {
        "params": [p for p in trainable if p.ndim < 2],
        "weight_decay": 0.0,
        "learning_rate_ratio": 1.0,
    }
    if recipe.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = _adamw([matrices, others], recipe)
    else:
        matrices["learning_rate_ratio"] = recipe.muon_learning_rate_ratio
        muon = torch.optim.Muon([matrices], momentum=recipe.muon_momentum)
        optimizer = _Together([muon, _adamw([others], recipe)])
    set_learning_rate(optimizer, recipe.learning_rate)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group of `build_optimizer`'s: its own multiple of `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["learning_rate_ratio"]


def _adamw(groups: list[dict[str, Any]], recipe: TrainRecipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, fused=True)


class _Together(torch.optim.Optimizer):
    """Several optimizers of different weights as one, with one state and one list of groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading a state puts new objects in the place of the old ones.
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self._parts:
            end = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:end]
            first = end

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of each; `closure` is called once."""
        loss = self._parts[0].step(closure)
        for part in self._parts[1:]:
            part.step()
        return loss
