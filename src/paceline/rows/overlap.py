"""How much of some prompts also stands in training prompts.

Counted in 8-grams: runs of eight whitespace-separated, lower-cased words of one user turn. Eight
is long enough that common phrases do not count, and short enough for a changed number or name to
leave some of a copied prompt standing. A turn of fewer words counts as one gram, whole. System
turns are left out: they are shared by design.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
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
    """Held-out prompts first, then the training prompts in a stream; both as `grams_of`.

    Memory grows with the held-out grams alone.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, list[int]] = {}
        """Gram to the held-out prompts that have it."""
        self._sizes: list[int] = []
        """Grams of each held-out prompt."""
        self._sources: list[str] = []
        self._shared: set[bytes] = set()

    def add_heldout(self, source: str, grams: Sequence[bytes]) -> None:
        """Remember a held-out prompt's grams."""
        for gram in grams:
            self._holders.setdefault(gram, []).append(len(self._sizes))
        self._sizes.append(len(grams))
        self._sources.append(source)

    def share(self, grams: Sequence[bytes]) -> float:
        """The largest share of a held-out prompt's grams that are among these."""
        held = Counter(
            prompt for gram in grams if gram in self._holders for prompt in self._holders[gram]
        )
        return max((count / self._sizes[prompt] for prompt, count in held.items()), default=0.0)

    def add_train(self, grams: Sequence[bytes]) -> None:
        """Mark the held-out grams that a training prompt has."""
        self._shared.update(gram for gram in grams if gram in self._holders)

    def counts(self) -> dict[str, OverlapCount]:
        """Per held-out data set."""
        shared = Counter(prompt for gram in self._shared for prompt in self._holders[gram])
        result = {}
        for source in dict.fromkeys(self._sources):
            prompts = [i for i, name in enumerate(self._sources) if name == source]
            result[source] = OverlapCount(
                prompts=len(prompts),
                touched_prompts=sum(shared[prompt] > 0 for prompt in prompts),
                grams=sum(self._sizes[prompt] for prompt in prompts),
                shared_grams=sum(shared[prompt] for prompt in prompts),
            )
        return result


def grams_of(messages: Sequence[dict[str, Any]]) -> tuple[bytes, ...]:
    """Hashes (8 bytes) of the different grams of a conversation's user turns, in order."""
    found = dict.fromkeys(_grams(messages))
    return tuple(blake2b(gram.encode("utf-8", "replace"), digest_size=8).digest() for gram in found)


def _grams(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        if message["role"] != "user":
            continue
        words = message["content"].lower().split()
        for start in range(max(1, len(words) - GRAM + 1) if words else 0):
            yield " ".join(words[start : start + GRAM])
