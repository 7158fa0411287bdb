"""What a term of the objective counts, and how much a step's sum of it weighs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.objective.blocks import decay_weights
from paceline.recipe.objective_terms import NEEDS_TEACHER, WEIGHS_ITSELF, ObjectiveTerm, weight_at

_LABELLED = ("cross_entropy", "confident_right")


@dataclass(frozen=True)
class SlotCounts:
    """How many slots and blocks there are to learn from: known from tokens alone, and additive."""

    valid: tuple[int, ...]
    """By slot 1..B-1: those that the answer has."""
    counted: tuple[int, ...]
    """By slot: those of them whose label the drafter can propose."""
    blocks: int
    """Those with a valid slot."""

    @classmethod
    def of(cls, valid: torch.Tensor, proposed: torch.Tensor) -> "SlotCounts":
        """Of blocks, both bool [A, D]."""
        return cls(
            valid=tuple(valid.sum(dim=0).tolist()),
            counted=tuple((valid & proposed).sum(dim=0).tolist()),
            blocks=int(valid.any(dim=1).sum()),
        )

    def __add__(self, other: "SlotCounts") -> "SlotCounts":
        return SlotCounts(
            valid=tuple(a + b for a, b in zip(self.valid, other.valid, strict=True)),
            counted=tuple(a + b for a, b in zip(self.counted, other.counted, strict=True)),
            blocks=self.blocks + other.blocks,
        )


def needs_label(term: ObjectiveTerm) -> bool:
    """Whether slots whose label the drafter cannot propose have nothing of the term."""
    return term.kind in _LABELLED


def needs_teacher(terms: Sequence[ObjectiveTerm], scales: Sequence[float]) -> bool:
    """Whether a term that has a scale reads the target's distribution."""
    return any(s and t.kind in NEEDS_TEACHER for t, s in zip(terms, scales, strict=True))


def normaliser(term: ObjectiveTerm, counts: SlotCounts) -> float:
    """What the term's sum is divided by; it depends on no prediction.

    Blocks, for the kinds that are of whole blocks; else slots, each with its weight by `gamma`
    where the positions have one.
    """
    if term.kind in WEIGHS_ITSELF:
        return float(counts.blocks)
    slots = counts.counted if needs_label(term) else counts.valid
    if term.positions not in ("decay", "streak_decay"):
        return float(sum(slots))
    weights = decay_weights(len(slots) + 1, _gamma(term)).tolist()
    return sum(n * w for n, w in zip(slots, weights, strict=True))


def scales(terms: Sequence[ObjectiveTerm], counts: SlotCounts, progress: float) -> list[float]:
    """Factors on the terms' sums that make the step's loss; 0 for a term with nothing to count."""
    found = []
    for term in terms:
        count = normaliser(term, counts)
        found.append(weight_at(term, progress) / count if count else 0.0)
    return found


def names(terms: Sequence[ObjectiveTerm]) -> list[str]:
    """A name for each term: its kind, and a number where there are several of it."""
    seen: Counter[str] = Counter()
    found = []
    for term in terms:
        seen[term.kind] += 1
        found.append(term.kind if seen[term.kind] == 1 else f"{term.kind}_{seen[term.kind]}")
    return found


def slot_weights(term: ObjectiveTerm, slots: int) -> torch.Tensor:
    """fp32 [slots]: what of the term's weights is the same in every block."""
    if term.positions in ("decay", "streak_decay"):
        return decay_weights(slots + 1, _gamma(term))
    return torch.ones(slots)


def _gamma(term: ObjectiveTerm) -> float:
    if term.gamma is None:
        raise ValueError(f"{term.kind}: `objective_of` fills in gamma")
    return term.gamma
