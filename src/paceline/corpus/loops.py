"""Answers that go round in circles, which greedy decoding of small models is prone to."""

from collections import Counter
from collections.abc import Sequence

GRAM = 8
"""Tokens of the repeated piece."""


def is_loop(ids: Sequence[int], repeats: int) -> bool:
    """Whether some 8-gram of token ids occurs `repeats` times without overlapping itself.

    Occurrences that overlap count once: the rule line of a wide table repeats within itself and
    is no loop, while a real one goes on and is found either way.
    """
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
