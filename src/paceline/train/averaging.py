"""Several drafters' weights made one: on the CPU, tensor by tensor, in fp32.

docs/algorithms.md, "Several drafters".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.flow.parcel import Parcel

Weights = Mapping[str, torch.Tensor]
"""Trainable tensors by name, fp32 on the CPU."""


@dataclass(frozen=True)
class Share:
    """What one drafter brings to an average."""

    weights: Weights
    tokens: int
    """Context tokens that it has learned from since the last one: its weight."""


def trainable(drafter: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that training moves, by name; frozen ones are nobody's to average."""
    return {n: p.data for n, p in drafter.named_parameters() if p.requires_grad}


def weights_in(parcel: Parcel, drafter: nn.Module) -> dict[str, torch.Tensor]:
    """Views of a parcel that holds the trainable tensors of such a drafter, one after another."""
    found, offset = {}, 0
    for name, tensor in trainable(drafter).items():
        found[name] = parcel.tensor(torch.float32, tuple(tensor.shape), offset)
        offset += 4 * tensor.numel()
    return found


def give_weights(drafter: nn.Module) -> tuple[Parcel, bool]:
    """A parcel with the trainable tensors, and whether all of them are finite.

    They leave the device one at a time, so nothing is added to what it holds.
    """
    own = trainable(drafter)
    parcel = Parcel.of(4 * sum(tensor.numel() for tensor in own.values()))
    views = weights_in(parcel, drafter)
    is_finite = True
    for name, tensor in own.items():
        views[name].copy_(tensor)
        is_finite &= bool(torch.isfinite(views[name]).all())
    return parcel, is_finite


@torch.no_grad()
def take_weights(drafter: nn.Module, weights: Weights) -> None:
    """Replace the trainable tensors in place."""
    for name, tensor in trainable(drafter).items():
        tensor.copy_(weights[name])


class Outer:
    """How the model goes towards an average: all the way, or as an outer optimizer has it.

    Nesterov's momentum on the way from the model to the average (DiLoCo, arXiv 2311.08105,
    section 3): v <- momentum * v + (model - average), model <- model - rate * (momentum * v +
    (model - average)).
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.velocity: dict[str, torch.Tensor] = {}
        """fp32, by name; empty before the first step, and without momentum."""

    @torch.no_grad()
    def go(self, model: nn.Module, shares: Sequence[Share]) -> None:
        """Move `model`, on the CPU, by the average of `shares`, weighted by tokens.

        Without a share of a token it stays where it is.
        """
        shares = [share for share in shares if share.tokens]
        total = sum(share.tokens for share in shares)
        if not total:
            return
        is_plain = self.rate == 1.0 and not self.momentum
        for name, tensor in trainable(model).items():
            # Of one drafter alone the weight is 1.0, and not a bit of it changes.
            average = shares[0].weights[name] * (shares[0].tokens / total)
            for share in shares[1:]:
                average.add_(share.weights[name], alpha=share.tokens / total)
            if is_plain:
                tensor.copy_(average)
                continue
            way = tensor - average
            velocity = self.velocity.setdefault(name, torch.zeros_like(way))
            velocity.mul_(self.momentum).add_(way)
            tensor.sub_(way.add_(velocity, alpha=self.momentum), alpha=self.rate)
