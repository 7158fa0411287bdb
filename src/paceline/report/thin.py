"""Curves with as many points as a page can hold, that still show every spike."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

POINTS = 2000
"""Of a curve on the page, at most."""


def thin(values: Sequence[float], limit: int = POINTS) -> list[int]:
    """Indices to keep, ascending: at most `limit`, with the first, the last, and all if few.

    In between the values are cut into equal runs, of which the lowest and the highest stay.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1}
    for run in _runs(count, (limit - 2) // 2):
        finite = [i for i in run if math.isfinite(values[i])]
        if finite:
            kept.add(min(finite, key=lambda i: values[i]))
            kept.add(max(finite, key=lambda i: values[i]))
        else:
            kept.add(run[0])
    return sorted(kept)


def smooth(values: Sequence[float], window: int, at: Sequence[int]) -> list[float]:
    """Mean of the finite values in a window centred at each index of `at`; NaN without any."""
    finite = [math.isfinite(v) for v in values]
    sums = [0.0, *accumulate(v if f else 0.0 for v, f in zip(values, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    means = []
    for index in at:
        low, high = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / count if count else math.nan)
    return means


def _runs(count: int, parts: int) -> Iterator[range]:
    for part in range(parts):
        yield range(count * part // parts, count * (part + 1) // parts)
