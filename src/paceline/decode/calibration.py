"""One temperature for each depth of a draft; docs/algorithms.md, "Calibration".

A tree weighs depths against each other, so a depth that is too sure of itself takes nodes from the
others. Dividing its logits by a temperature mends that and changes no order within it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.decode.slot_figures import DepthFigures, SlotTally

LEAST = 50
"""Labels below which a depth has the temperature of the depth before it, or 1."""
HOTTEST = 4.0
_STEPS = 9
_ELEMENTS = 1 << 20
"""Logits looked at at a time; a few times 8 MiB."""
_NEVER = -170.0
"""Below the best logit by so much, a token counts for nothing at any temperature of the grid."""


class TemperatureFit:
    """Finds the temperatures of lowest NLL in one pass, whatever the number of anchors.

    By the inverse temperature the NLL is convex. Its slope and curvature are summed in fp64 at nine
    temperatures from 4 to 1/4, a factor of √2 apart; between them the slope is a cubic that
    has both right at both ends, and the temperature is where it is 0.
    """

    def __init__(self, depths: int) -> None:
        self._betas = [2 ** (i / 2) / HOTTEST for i in range(_STEPS)]
        self._sums = torch.zeros(2, _STEPS, depths, dtype=torch.float64)
        self._labels = torch.zeros(depths, dtype=torch.int64)

    def add(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        proposed: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Count a batch, as in `SlotTally.add`; labels that are not proposed are left out."""
        anchors, depths = torch.nonzero(valid & proposed, as_tuple=True)
        for part in torch.arange(anchors.numel()).split(max(1, _ELEMENTS // logits.shape[-1])):
            a, d = anchors[part], depths[part]
            self._add(logits[a, d].double(), labels[a, d], d.cpu())

    def _add(self, rows: torch.Tensor, labels: torch.Tensor, depths: torch.Tensor) -> None:
        rows -= rows.amax(dim=-1, keepdim=True)
        rows.clamp_(min=_NEVER)
        own = rows.gather(-1, labels[:, None])[:, 0]
        powers = torch.stack((torch.ones_like(rows), rows, rows * rows), dim=1)
        weights = [torch.exp(beta * rows) for beta in self._betas[:2]]
        for step in range(_STEPS):
            # Two steps on, the inverse temperature is twice as large.
            current = weights[step % 2] if step < 2 else weights[step % 2].square_()
            total, first, second = (powers @ current[:, :, None])[:, :, 0].unbind(dim=1)
            mean = first / total
            self._sums[0, step].index_add_(0, depths, (mean - own).cpu())
            self._sums[1, step].index_add_(0, depths, (second / total - mean.square()).cpu())
        self._labels += torch.bincount(depths, minlength=self._labels.numel())

    def temperatures(self, least: int = LEAST) -> tuple[float, ...]:
        """By depth, between 1/4 and 4; a depth with fewer than `least` labels is not fitted."""
        found: list[float] = []
        for depth, labels in enumerate(self._labels.tolist()):
            if labels >= max(least, 1):
                slopes, curves = self._sums[:, :, depth].tolist()
                found.append(1.0 / _lowest(self._betas, slopes, curves))
            else:
                found.append(found[-1] if found else 1.0)
        return tuple(found)


def _lowest(betas: Sequence[float], slopes: Sequence[float], curves: Sequence[float]) -> float:
    """Where a convex function of log beta is lowest, from its derivatives by beta at `betas`."""
    if slopes[0] >= 0:
        return betas[0]
    for i in range(len(betas) - 1):
        if slopes[i + 1] >= 0:
            break
    else:
        return betas[-1]
    width = math.log(betas[i + 1] / betas[i])
    ends = slopes[i], slopes[i + 1]
    rises = curves[i] * betas[i] * width, curves[i + 1] * betas[i + 1] * width
    low, high = 0.0, 1.0
    for _ in range(50):
        t = (low + high) / 2
        rest = 1 - t
        value = rest * rest * ((1 + 2 * t) * ends[0] + t * rises[0])
        value += t * t * ((1 + 2 * rest) * ends[1] - rest * rises[1])
        low, high = (t, high) if value < 0 else (low, t)
    return betas[i] * math.exp(width * (low + high) / 2)


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and the figures of the same slots without and with them."""

    temperatures: tuple[float, ...]
    before: tuple[DepthFigures, ...]
    after: tuple[DepthFigures, ...]


def fit_temperatures(
    logits: torch.Tensor,
    labels: torch.Tensor,
    valid: torch.Tensor,
    *,
    least: int = LEAST,
) -> Calibration:
    """Temperatures by depth, of logits that are all there.

    Where they are not, a `TemperatureFit` takes them batch by batch, and a `SlotTally` with its
    temperatures says in another pass what they are worth; `accepted_depths` feeds both.

    Args:
        logits: [A, D, V] on anchors that the drafter was not trained on.
        labels: int64 [A, D], the column of the target's own choice.
        valid: bool [A, D].
        least: labels that a depth needs to be fitted.

    """
    proposed = torch.ones_like(valid)
    depths = logits.shape[1]
    fit, before = TemperatureFit(depths), SlotTally(depths)
    for observer in (fit, before):
        observer.add(logits, labels, proposed, valid)
    temperatures = fit.temperatures(least)
    after = SlotTally(depths, temperatures)
    after.add(logits, labels, proposed, valid)
    return Calibration(temperatures, before.figures(), after.figures())
