"""Answers that go round in circles, which greedy decoding of small models is prone to."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

GRAM = 8
"""Tokens of the repeated piece."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def is_loop(ids: Sequence[int], repeats: int) -> bool:
    """Whether some 8-gram of token ids occurs `repeats` times without overlapping itself.

    Occurrences that overlap count once: the rule line of a wide table repeats within itself and
    is no loop, while a real one goes on and is found either way.
    """
    return _may_loop(ids, repeats) and _is_loop(ids, repeats)


def _may_loop(ids: Sequence[int], repeats: int) -> bool:
    """False where no 8-gram comes so often, overlapping or not: cheap, and true of most answers."""
    if len(ids) < GRAM * repeats:
        return False
    tokens = np.asarray(ids, dtype=np.uint64)
    hashed = np.zeros(len(tokens) - GRAM + 1, dtype=np.uint64)
    for place in range(GRAM):
        # Products and sums wrap around; equal grams have equal sums, which is all that is asked.
        hashed = hashed * _MULTIPLIER + tokens[place : place + len(hashed)]
    hashed.sort()
    return bool((hashed[repeats - 1 :] == hashed[: len(hashed) - repeats + 1]).any())


def _is_loop(ids: Sequence[int], repeats: int) -> bool:
    counts: Counter[tuple[int, ...]] = Counter()
    free_from: dict[tuple[int, ...], int] = {}
    for start in range(len(ids) - GRAM + 1):
        gram = tuple(ids[start : start + GRAM])
        if start < free_from.get(gram, 0):
            continue
        counts[gram] += 1
        free_from[gram] = start + GRAM
        if counts[gram] >= repeats:
            return True
    return False
