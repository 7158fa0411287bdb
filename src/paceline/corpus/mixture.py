"""Which samples of each source are taken, where the recipe does not take all of them.

Of each source those of the lowest hash are taken, so the choice depends on no order of rows, and
rows that are added later displace few of those that are there.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.recipe.schema import SourceRecipe


@dataclass(frozen=True, slots=True)
class Candidate:
    """An accepted row."""

    source: int
    """Place of its source in the recipe."""
    key: int
    """`mixture_key` of its sample."""
    samples: int
    """How many samples it gives."""


def mixture_key(seed: int, sample_id: bytes) -> int:
    """A number of 64 bits that orders the samples of a source."""
    text = f"mixture:{seed}:{sample_id.hex()}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def is_mixed(sources: Sequence[SourceRecipe]) -> bool:
    """Whether any source is perhaps not taken whole."""
    return any(s.weight is not None or s.max_samples is not None for s in sources)


def left_out(candidates: Sequence[Candidate], sources: Sequence[SourceRecipe]) -> dict[int, str]:
    """Candidates that are not taken, by their place, with the reason: a cap or a weight.

    Caps (`max_samples`) come first. Then the weights: of each source with one, in samples, the
    part that makes the sources' shares those of their weights, as large as the source that has
    least for its weight allows. A source without accepted rows has no say in that.
    """
    reasons: dict[int, str] = {}
    sizes: dict[int, int] = {}
    ordered: dict[int, list[int]] = {}
    for number, source in enumerate(sources):
        places = [i for i, row in enumerate(candidates) if row.source == number]
        places.sort(key=lambda i: (candidates[i].key, i))
        ordered[number] = list(_up_to(places, candidates, source.max_samples))
        sizes[number] = sum(candidates[i].samples for i in ordered[number])
        reasons |= dict.fromkeys(set(places) - set(ordered[number]), "over_max_samples")
    for number, wanted in _weighted(sizes, sources).items():
        # Sizes are whole numbers: what is off by a rounding of the division is not one less.
        kept = set(_up_to(ordered[number], candidates, int(wanted + 1e-6)))
        reasons |= dict.fromkeys(set(ordered[number]) - kept, "over_weight")
    return reasons


def expected_sizes(sizes: Sequence[float], sources: Sequence[SourceRecipe]) -> list[float]:
    """How many samples are taken of each source, of `sizes` that it has."""
    caps = [math.inf if s.max_samples is None else s.max_samples for s in sources]
    capped = dict(enumerate(map(min, sizes, caps)))
    return list({**capped, **_weighted(capped, sources)}.values())


def _weighted(sizes: Mapping[int, float], sources: Sequence[SourceRecipe]) -> dict[int, float]:
    """Samples of each source with a weight, by its place."""
    weights = {i: s.weight for i, s in enumerate(sources) if s.weight is not None and sizes[i]}
    scale = min((sizes[i] / weight for i, weight in weights.items()), default=0.0)
    return {i: scale * weight for i, weight in weights.items()}


def _up_to(places: list[int], candidates: Sequence[Candidate], most: int | None) -> Iterator[int]:
    """The first ones, with no more than `most` samples in all."""
    samples = 0
    for place in places:
        samples += candidates[place].samples
        if most is not None and samples > most:
            return
        yield place
