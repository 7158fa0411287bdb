"""One term of the training objective, as a recipe names it."""

from dataclasses import dataclass
from typing import Literal

TermKind = Literal[
    "cross_entropy", "kl", "reverse_kl", "tv", "lk_alpha", "lk_hybrid", "expected_length",
    "confident_right", "overconfident_wrong", "tree",
]  # fmt: skip
Positions = Literal["uniform", "decay", "streak", "streak_decay", "tree"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveTerm:
    """A term: what is computed of each slot, how the slots weigh, and how much it counts."""

    kind: TermKind
    """`cross_entropy` with the answer's token; `kl`, `reverse_kl`, `tv` to the target's
    distribution; `lk_alpha`, `lk_hybrid` (LK losses of acceptance); `expected_length` of a chain;
    `confident_right` (entropy where the best token is right), `overconfident_wrong` (confidence
    where it is wrong); `tree`, the expected depth inside a draft tree."""
    weight: float = 1.0
    """Factor on the term, up to the beginning of `ramp`."""
    end_weight: float | None = None
    """Factor from the end of `ramp` on; null keeps `weight` all along."""
    ramp: tuple[float, float] = (0.0, 1.0)
    """Shares of the run between which the factor goes from `weight` to `end_weight`, linearly; two
    equal ones make a step."""
    positions: Positions = "decay"
    """How slots weigh: `uniform`; `decay`, exp(-(k - 1) / gamma); `streak`, by the probability of
    what precedes them (D-PACE); `streak_decay`, both; `tree`, as `streak` for a draft tree.
    `expected_length` and `tree` weigh by themselves."""
    gamma: float | None = None
    """Of `decay` and `streak_decay`; null takes `train.gamma`."""
    alpha: float = 0.5
    """Smoothing of `streak`, `streak_decay` and `tree` positions: 0 is none."""
    temperature: float = 1.0
    """Softens both distributions of `kl` and `reverse_kl` (times its square); the edge of the draft
    tree, in nats."""
    eta: float = 3.0
    """Of `lk_hybrid`: its share of KL is exp(-eta * acceptance)."""
    budget: int = 64
    """Nodes of the draft tree, for `tree`."""


NEEDS_TEACHER: frozenset[TermKind] = frozenset(
    ("kl", "reverse_kl", "tv", "lk_alpha", "lk_hybrid", "expected_length")
)
"""Kinds that read the target's distribution, from `last`."""

NEEDS_ACCEPTANCE: frozenset[TermKind] = frozenset(
    ("tv", "lk_alpha", "lk_hybrid", "expected_length")
)
"""Kinds in which the target's distribution is over all of its tokens, proposed or not."""

WEIGHS_ITSELF: frozenset[TermKind] = frozenset(("expected_length", "tree"))
"""Kinds of whole blocks: they have no weights of positions."""


def weight_at(term: ObjectiveTerm, progress: float) -> float:
    """The term's factor once `progress` of the run's samples, 0 to 1, are consumed."""
    if term.end_weight is None:
        return term.weight
    begin, end = term.ramp
    if progress >= end:
        return term.end_weight
    if progress <= begin:
        return term.weight
    share = (progress - begin) / (end - begin)
    return term.weight + share * (term.end_weight - term.weight)
