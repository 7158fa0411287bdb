"""Small drafters, targets and documents for tests of drafting, training and decoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drafter.attention import Document
from paceline.drafter.build import drafter_config, new_drafter
from paceline.drafter.dflash import DFlash
from paceline.recipe.objective_inputs import objective_of
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.schema import DrafterRecipe, TargetRecipe, TrainRecipe
from paceline.target.load import Target, load_target
from paceline.types import Features, TokenBatch
from tiny_models import tiny_model

TAPS = (1, 2, 3)
MASK = 300


def load_tiny_target(folder: Path, kind: str = "llama", **overrides: object) -> Target:
    """A tiny random target, saved and loaded again."""
    return load_target(TargetRecipe(path=str(tiny_model(kind, folder / "target", **overrides))))


def tiny_drafter(
    target: Target,
    *,
    block_size: int = 4,
    layers: int = 2,
    init: str = "random",
    seed: int = 0,
    **more: Any,
) -> DFlash:
    """A drafter of the target's shape, in eval mode; `more` are other fields of its recipe."""
    recipe = DrafterRecipe(layers=layers, block_size=block_size, init=init, **more)
    config = drafter_config(
        recipe, target.spec, TAPS, mask_token_id=MASK, template_digest="", template_args={}
    )
    drafter = new_drafter(config, recipe, target.spec, target.folder, seed=seed).eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        for name, parameter in drafter.named_parameters():
            # Larger weights than training starts from: otherwise attention is nearly uniform
            # and what a block sees hardly shows in what it says.
            scale = 0.3 if "norm" in name else 0.25
            parameter.add_(scale * torch.randn_like(parameter))
    return drafter


@dataclass(frozen=True)
class Doc:
    """A document with the features that the target gives it."""

    ids: torch.Tensor
    mask: torch.Tensor
    taps: torch.Tensor


def make_doc(target: Target, length: int, *, answer_from: int, seed: int = 0) -> Doc:
    """Random tokens, trainable from `answer_from` on."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (length,), generator=generator)
    mask = torch.arange(length) >= answer_from
    features = capture(target, ids, mask)
    return Doc(ids=ids, mask=mask, taps=features.taps)


def capture(target: Target, ids: torch.Tensor, mask: torch.Tensor) -> Features:
    """The target's features of one document."""
    batch = TokenBatch(
        input_ids=ids,
        loss_mask=mask,
        offsets=torch.tensor([0, ids.numel()]),
        sample_ids=(f"doc-{ids.numel()}-{int(ids.sum())}",),
    )
    return target.capture(batch, TAPS)


def decayed(gamma: float) -> tuple[ObjectiveTerm, ...]:
    """The objective of a recipe that names none."""
    return objective_of(TrainRecipe(gamma=gamma))


def run_blocks(
    drafter: DFlash, target: Target, doc: Doc, anchors: list[int], taps: torch.Tensor | None = None
) -> torch.Tensor:
    """Hidden states [A, B - 1, H] of blocks at `anchors`, in one training-mode pass."""
    taps = doc.taps if taps is None else taps
    block = drafter.config.block_size
    where = torch.tensor(anchors)
    ids = torch.full((len(anchors), block), drafter.config.mask_token_id)
    ids[:, 0] = doc.ids[where]
    document = Document(rows=slice(0, taps.shape[0]), blocks=slice(0, len(anchors)))
    with torch.no_grad():
        return drafter(target.head.embed(ids), where, taps, torch.arange(taps.shape[0]), [document])
