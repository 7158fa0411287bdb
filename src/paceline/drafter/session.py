"""One request's state in the drafter: the context's keys and values, layer by layer."""

import torch

from paceline.drafter.attention import Context, Document
from paceline.drafter.dflash import DFlash
from paceline.target.head import TargetHead


class DraftSession:
    """Drafts round after round; grows only by the features of committed tokens.

    The keys and values of a block never enter the state, so nothing has to be cropped after a
    rejection.
    """

    def __init__(self, drafter: DFlash, head: TargetHead) -> None:
        """`head` is `drafter.narrowed` of the target's."""
        drafter.check_head(head)
        self._drafter = drafter
        self._head = head
        self._contexts: list[Context] | None = None
        block = drafter.config.block_size
        self._masks = torch.full((block - 1,), drafter.config.mask_token_id)

    @property
    def length(self) -> int:
        """Context tokens held: those whose features the target has put out."""
        return 0 if self._contexts is None else self._contexts[0][0].shape[0]

    def extend(self, taps: torch.Tensor) -> None:
        """Append the features [t, L, H] of the tokens that were just committed."""
        start = self.length
        positions = torch.arange(start, start + taps.shape[0], device=taps.device)
        dtype = self._drafter.fc.weight.dtype
        new = self._drafter.contexts(taps.to(dtype), positions)
        if self._contexts is None:
            self._contexts = new
        else:
            self._contexts = [
                (torch.cat((keys, more_keys)), torch.cat((values, more_values)))
                for (keys, values), (more_keys, more_values) in zip(
                    self._contexts, new, strict=True
                )
            ]

    def slot_logits(self, anchor_token: int) -> torch.Tensor:
        """fp32 [B - 1, K] for the positions after the anchor, which stands at `length`.

        Columns are draft ids; `DFlash.to_target` translates them.
        """
        if self._contexts is None:
            raise ValueError("slot_logits before extend: the prompt's features are missing")
        device = self._contexts[0][0].device
        ids = torch.cat((torch.tensor([anchor_token]), self._masks)).to(device)
        hidden = self._drafter.draft(
            self._head.embed(ids)[None],
            torch.tensor([self.length], device=device),
            self._contexts,
            [Document(rows=slice(None), blocks=slice(None))],
        )
        return self._head.logits(hidden[0]).float()
