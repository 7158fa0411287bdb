"""A drafter without training that is right about half of the time: paths of all lengths occur."""

from collections.abc import Sequence

import torch

from paceline.drafter.attention import Context, Document
from paceline.drafter.build import drafter_config, new_drafter
from paceline.drafter.dflash import DFlash
from paceline.recipe.schema import DrafterRecipe
from paceline.target.load import Target
from paceline.target.taps import default_taps


class Pushed(DFlash):
    """Adds, to about half of the slots, the direction of the token that the answer has there."""

    answer: torch.Tensor
    rows: torch.Tensor

    def draft(
        self,
        embeddings: torch.Tensor,
        anchors: torch.Tensor,
        contexts: Sequence[Context],
        documents: Sequence[Document],
    ) -> torch.Tensor:
        """As DFlash drafts, and pushed."""
        hidden = super().draft(embeddings, anchors, contexts, documents)
        for block, anchor in enumerate(anchors.tolist()):
            for slot in range(hidden.shape[1]):
                place = anchor + 1 + slot
                if place < self.answer.numel() and place * 2654435761 % 7 < 4:
                    hidden[block, slot] += 40.0 * self.rows[self.answer[place]]
        return hidden


def pushed_drafter(target: Target, *, layers: int, depth: int) -> Pushed:
    """Untrained; set its `answer`, prompt and answer int64 [S], and its `rows`, lm_head's."""
    spec = target.spec
    recipe = DrafterRecipe(layers=layers, block_size=depth + 1)
    config = drafter_config(
        recipe,
        spec,
        default_taps(spec.num_layers, 3),
        mask_token_id=spec.vocab_size - 1,
        template_digest="",
        template_args={},
    )
    made = new_drafter(config, recipe, spec, target.folder, seed=0)
    drafter = Pushed(config)
    drafter.load_state_dict(made.state_dict())
    return drafter.eval()
