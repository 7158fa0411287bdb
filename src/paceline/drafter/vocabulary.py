"""A reduced draft vocabulary: the tokens that a drafter may propose, and their numbering.

docs/algorithms.md, "Reduced draft vocabulary".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from paceline.durable.errors import RecipeError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """K of the target's tokens; the draft id of a token is its place among them."""

    ids: torch.Tensor
    """int64 [K], rising target ids."""
    t2d: torch.Tensor
    """bool [V], V the rows of the target's lm_head: whether a target id is among them."""

    @classmethod
    def of(cls, ids: Iterable[int], vocab_size: int) -> Self:
        """The vocabulary of these target ids, in any order.

        Raises ValueError where one is no row of 0..vocab_size - 1, or there is none.
        """
        chosen = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        if not chosen.numel() or int(chosen[0]) < 0 or int(chosen[-1]) >= vocab_size:
            raise ValueError(f"a draft vocabulary needs ids between 0 and {vocab_size - 1}")
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[chosen] = True
        return cls(ids=chosen, t2d=t2d)

    @classmethod
    def from_tables(cls, d2t: torch.Tensor, t2d: torch.Tensor) -> Self:
        """The vocabulary that `d2t` (int64 [K] offsets) and `t2d` (bool [V]) describe.

        Raises ValueError where the two disagree.
        """
        if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
            raise ValueError(f"d2t is {d2t.dtype}, t2d {t2d.dtype}; int64 and bool are needed")
        ids = torch.arange(d2t.numel(), device=d2t.device) + d2t
        if not torch.equal(ids, torch.nonzero(t2d).flatten()):
            raise ValueError(
                f"d2t (of {d2t.numel()} tokens) and t2d (of {int(t2d.sum())}) name different ones"
            )
        return cls(ids=ids, t2d=t2d)

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [K] *offsets*: target id = draft id + d2t[draft id]."""
        return self.ids - torch.arange(len(self), device=self.ids.device)

    def __len__(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True)
class Coverage:
    """How much of some counted tokens a vocabulary can propose."""

    covered: int
    """Tokens whose id is in the vocabulary."""
    total: int
    """All tokens that were counted."""

    @property
    def share(self) -> float:
        """Between 0 and 1; 1 where nothing was counted."""
        return self.covered / self.total if self.total else 1.0


def coverage(vocabulary: DraftVocabulary, counts: torch.Tensor) -> Coverage:
    """Coverage of counts int64 [V] per target id."""
    inside = counts[vocabulary.ids.to(counts.device)]
    return Coverage(covered=int(inside.sum()), total=int(counts.sum()))


def choose_vocabulary(
    counts: torch.Tensor, size: int, *, tokenizer_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent tokens; of equal counts, unseen ones included, the lowest ids.

    Args:
        counts: int64 [V] per target id, V the rows of the target's lm_head.
        size: K.
        tokenizer_size: ids from here on are padding rows, which no text has: never chosen.
        always: ids below `tokenizer_size` that are chosen whatever their count (end tokens).

    Raises:
        RecipeError: fewer than `size` tokens exist, or more than that have to be chosen.

    """
    forced = sorted(set(always))
    if size > tokenizer_size:
        raise RecipeError(
            f"drafter.draft_vocab: {size} tokens are asked for, the target's tokenizer has "
            f"{tokenizer_size}. Lower it, or leave it out for the whole vocabulary."
        )
    if size < len(forced):
        raise RecipeError(
            f"drafter.draft_vocab: {size} has no room for the target's {len(forced)} end tokens. "
            "Raise it."
        )
    rank = counts[:tokenizer_size].clone()
    rank[torch.tensor(forced, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    order = rank.argsort(descending=True, stable=True)
    return DraftVocabulary.of(order[:size].tolist(), counts.numel())
