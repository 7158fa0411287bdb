"""How much of the held-out prompts also stands in training prompts.

Counted in 8-grams: runs of eight whitespace-separated, lower-cased words of one user turn. Eight
is long enough that common phrases do not count, and short enough for a changed number or name to
leave some of a copied prompt standing. A turn of fewer words counts as one gram, whole. System
turns are left out: they are shared by design.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GRAM = 8


@dataclass(frozen=True, slots=True)
class OverlapCount:
    """One held-out data set against all training prompts."""

    prompts: int
    touched_prompts: int
    """Prompts with at least one gram that a training prompt has too."""
    grams: int
    shared_grams: int
    """Grams, each counted once per prompt, that a training prompt has too."""

    def numbers(self) -> dict[str, int | float]:
        """For the report."""
        return {
            "prompts": self.prompts,
            "touched_prompts": self.touched_prompts,
            "touched_fraction": self.touched_prompts / self.prompts if self.prompts else 0.0,
            "grams": self.grams,
            "shared_grams": self.shared_grams,
            "shared_fraction": self.shared_grams / self.grams if self.grams else 0.0,
        }


class Overlap:
    """Held-out prompts first, then the training prompts in a stream.

    Memory grows with the held-out grams alone.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, bool] = {}
        self._prompts: dict[str, list[tuple[str, ...]]] = {}

    def add_heldout(self, source: str, messages: list[dict[str, Any]]) -> None:
        """Remember a held-out prompt's grams."""
        grams = tuple(dict.fromkeys(_grams(messages)))
        for gram in grams:
            self._wanted.setdefault(gram, False)
        self._prompts.setdefault(source, []).append(grams)

    def add_train(self, messages: list[dict[str, Any]]) -> None:
        """Mark the held-out grams that a training prompt has."""
        if not self._wanted:
            return
        for gram in _grams(messages):
            if gram in self._wanted:
                self._wanted[gram] = True

    def counts(self) -> dict[str, OverlapCount]:
        """Per held-out data set."""
        result = {}
        for source, prompts in self._prompts.items():
            shared = [sum(self._wanted[gram] for gram in grams) for grams in prompts]
            result[source] = OverlapCount(
                prompts=len(prompts),
                touched_prompts=sum(count > 0 for count in shared),
                grams=sum(len(grams) for grams in prompts),
                shared_grams=sum(shared),
            )
        return result


def _grams(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        if message["role"] != "user":
            continue
        words = message["content"].lower().split()
        for start in range(max(1, len(words) - GRAM + 1) if words else 0):
            yield " ".join(words[start : start + GRAM])
