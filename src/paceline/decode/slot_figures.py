"""How well a drafter's distributions fit what the target says, depth by depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.decode.ddtree import check_temperatures
from paceline.decode.rows import ranks_of, sum_exp

RANKS = (1, 4, 16)
BINS = 15
_ELEMENTS = 1 << 22
"""Logits looked at at a time, 16 MiB."""
_SLOTS, _PROPOSED, _NLL = range(3)
_BINS = 3 + len(RANKS)


@dataclass(frozen=True)
class DepthFigures:
    """One depth's figures over all slots with a label."""

    slots: int
    """Slots with a label."""
    proposed: int
    """Those whose label is in the draft vocabulary."""
    covered: tuple[float, ...]
    """By `RANKS`: share of slots whose label is among the K best tokens; K = 1 is the accuracy."""
    nll: float
    """Mean negative log-likelihood of the labels that are in the draft vocabulary, in nats."""
    ece: float
    """Expected calibration error of the best token's probability, 15 bins of equal width."""


class SlotTally:
    """Sums figures over any number of batches in the same few numbers."""

    def __init__(self, depths: int, temperatures: Sequence[float] | None = None) -> None:
        """With `temperatures`, [depths], the figures are those of the tempered distributions."""
        if temperatures is not None:
            check_temperatures(temperatures, depths)
        self._temperatures = None if temperatures is None else torch.tensor(temperatures)
        self.sums = torch.zeros(depths, _BINS + 2 * BINS, dtype=torch.float64)
        """What all figures are made of; those of several tallies add up to the whole's."""

    def add(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        proposed: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Count a batch.

        Args:
            logits: fp32 [A, D, V].
            labels: int64 [A, D], the column of what the target says.
            proposed: bool [A, D], whether it has one at all (else the label means nothing).
            valid: bool [A, D], whether the slot counts.

        """
        anchors, depths = torch.nonzero(valid, as_tuple=True)
        for part in torch.arange(anchors.numel()).split(max(1, _ELEMENTS // logits.shape[-1])):
            a, d = anchors[part], depths[part]
            self._add(logits[a, d], labels[a, d], proposed[a, d], d)

    def _add(
        self,
        rows: torch.Tensor,
        labels: torch.Tensor,
        proposed: torch.Tensor,
        depths: torch.Tensor,
    ) -> None:
        labels = labels.where(proposed, 0)
        ranks = ranks_of(rows, labels).where(proposed, rows.shape[-1])
        shifted = rows - rows.amax(dim=-1, keepdim=True)
        if self._temperatures is not None:
            shifted /= self._temperatures.to(rows.device)[depths][:, None]
        own = shifted.gather(-1, labels[:, None])[:, 0]
        sums = sum_exp(shifted)[:, 0]
        ranks, depths, own, sums, proposed = (x.cpu() for x in (ranks, depths, own, sums, proposed))
        sure = 1.0 / sums.double()
        bins = (sure * BINS).long().clamp_max(BINS - 1)
        for column, values in (
            (_SLOTS, torch.ones_like(sure)),
            (_PROPOSED, proposed),
            (_NLL, (sums.double().log() - own).where(proposed, 0.0)),
            *((3 + i, ranks < rank) for i, rank in enumerate(RANKS)),
            (_BINS + bins, sure),
            (_BINS + BINS + bins, ranks == 0),
        ):
            columns = torch.as_tensor(column).expand_as(depths)
            self.sums.index_put_((depths, columns), values.double(), accumulate=True)

    def figures(self) -> tuple[DepthFigures, ...]:
        """By depth, from 1 on; zeros where there was no slot."""
        return tuple(_figures(row) for row in self.sums)


def _figures(row: torch.Tensor) -> DepthFigures:
    slots, proposed, nll, *covered = row[:_BINS].tolist()
    sure, right = row[_BINS:].view(2, BINS)
    return DepthFigures(
        slots=int(slots),
        proposed=int(proposed),
        covered=tuple(count / max(slots, 1) for count in covered),
        nll=nll / max(proposed, 1),
        ece=float((sure - right).abs().sum()) / max(slots, 1),
    )
