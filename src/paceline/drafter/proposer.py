"""What every drafter shares: which tokens it proposes, and how they are numbered."""

from dataclasses import replace

import torch
from torch import nn

from paceline.drafter.config import DrafterConfig
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.target.head import TargetHead


class Proposer(nn.Module):
    """Proposes all tokens of the target, or those of a reduced vocabulary.

    The reduced one lies in the buffers `d2t` (int64 [K]) and `t2d` (bool [V]), named as serving
    engines name them. Buffers are saved with the weights, and neither trained nor averaged.
    """

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary | None = None) -> None:
        """Without a `vocabulary`, a config that has one gets room for it, to be loaded into."""
        super().__init__()
        self.config = config
        size = config.draft_vocab_size
        if vocabulary is not None and (len(vocabulary), vocabulary.t2d.numel()) != (
            size,
            config.vocab_size,
        ):
            raise ValueError(
                f"a vocabulary of {len(vocabulary)} of {vocabulary.t2d.numel()} tokens, the "
                f"config says {size} of {config.vocab_size}"
            )
        d2t = t2d = None
        if vocabulary is not None:
            d2t, t2d = vocabulary.d2t, vocabulary.t2d.clone()
        elif size is not None:
            d2t = torch.zeros(size, dtype=torch.int64)
            t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The reduced vocabulary; None where all of the target's tokens are proposed.

        Raises ValueError where the two buffers disagree.
        """
        if self.d2t is None or self.t2d is None:
            return None
        return DraftVocabulary.from_tables(self.d2t, self.t2d)

    @property
    def num_proposed(self) -> int:
        """K, or V where all tokens are proposed."""
        return self.config.draft_vocab_size or self.config.vocab_size

    def narrowed(self, head: TargetHead, *, keep_whole: bool = False) -> TargetHead:
        """The target's head with the lm_head rows [K, H] of the proposed tokens, copied once.

        The head itself, and no copy, where all tokens are proposed. It embeds every token still.
        `keep_whole` has it hold the other rows as well.
        """
        rows = self.proposed_ids
        if rows is None:
            return head
        whole = head.lm_head if keep_whole else None
        return replace(head, lm_head=head.lm_head[rows.to(head.lm_head.device)], whole=whole)

    @property
    def proposed_ids(self) -> torch.Tensor | None:
        """Target ids int64 [K] by draft id; None where all tokens are proposed."""
        if self.d2t is None:
            return None
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def check_head(self, head: TargetHead) -> None:
        """Raise ValueError for a head that `narrowed` has not made, or not for this drafter."""
        if head.lm_head.shape[0] != self.num_proposed:
            raise ValueError(
                f"a head of {head.lm_head.shape[0]} rows for a drafter that proposes "
                f"{self.num_proposed} tokens; `narrowed` makes the right one"
            )

    def proposes(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Whether target ids int64 [...] are proposed at all; bool, on their device."""
        if self.t2d is None:
            return torch.ones_like(target_ids, dtype=torch.bool)
        return self.t2d[target_ids.to(self.t2d.device)].to(target_ids.device)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids int64 [...]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft ids int64 [...] of target ids, and bool [...]: whether they are proposed at all.

        The draft id of a token that is not proposed means nothing.
        """
        rows = self.proposed_ids
        if rows is None:
            return target_ids, self.proposes(target_ids)
        places = torch.searchsorted(rows, target_ids).clamp_max(rows.numel() - 1)
        return places, self.proposes(target_ids)
