"""How sure a pooled τ is, and how sure a difference between two: by resampling prompts.

Prompts, not rounds, are what was drawn: rounds of one answer resemble each other, and resampling
them would promise more than was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 1000
_PAIRED_DRAWS = 10_000
"""A p-value needs more draws than the ends of an interval."""

_AT_A_TIME = 1 << 20
"""Indices that exist at a time: memory does not grow with the number of prompts."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The second's pooled τ less the first's, over the same prompts."""

    prompts: int
    value: float
    interval: tuple[float, float]
    """95 %, by resampling prompts, the same ones for both."""
    p_value: float
    """Two-sided: twice the share of resamples on the rarer side of 0, at most 1."""

    @property
    def is_significant(self) -> bool:
        """At the level of 5 %."""
        return self.p_value < 0.05


def tau_interval(
    tokens: Sequence[float], counts: Sequence[float], *, seed: int
) -> tuple[float, float]:
    """95 % interval of sum(tokens) / sum(counts), of prompts with one round at least, [P] each."""
    if not len(counts):
        return (0.0, 0.0)
    above, below = np.asarray(tokens, np.float64), np.asarray(counts, np.float64)
    taus = np.concatenate(
        [
            above[draws].sum(axis=1) / below[draws].sum(axis=1)
            for draws in _resamples(len(counts), _DRAWS, seed)
        ]
    )
    low, high = np.quantile(taus, (0.025, 0.975))
    return (float(low), float(high))


def paired(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]], *, seed: int
) -> Difference:
    """Compare two measurements of the same prompts, [P] pairs of tokens and rounds each.

    Raises ValueError for unequal numbers, for none, and for a prompt without a round.
    """
    one, two = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != two.shape or not len(one) or not (one[:, 1].all() and two[:, 1].all()):
        raise ValueError("paired: as many prompts on both sides, one at least, each with a round")
    value = two[:, 0].sum() / two[:, 1].sum() - one[:, 0].sum() / one[:, 1].sum()
    found = []
    for draws in _resamples(len(one), _PAIRED_DRAWS, seed):
        a, b = one[draws].sum(axis=1), two[draws].sum(axis=1)
        found.append(b[:, 0] / b[:, 1] - a[:, 0] / a[:, 1])
    differences = np.concatenate(found)
    low, high = np.quantile(differences, (0.025, 0.975))
    rarer = min((differences <= 0).sum(), (differences >= 0).sum())
    return Difference(
        prompts=len(one),
        value=float(value),
        interval=(float(low), float(high)),
        # As if one more resample had fallen there: no finite number of them proves a p of 0.
        p_value=min(1.0, 2.0 * (int(rarer) + 1) / (_PAIRED_DRAWS + 1)),
    )


def _resamples(prompts: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """Indices [some draws, prompts], `draws` rows in all."""
    generator = np.random.default_rng(seed)
    size = max(1, _AT_A_TIME // prompts)
    for start in range(0, draws, size):
        yield generator.integers(0, prompts, size=(min(size, draws - start), prompts))
