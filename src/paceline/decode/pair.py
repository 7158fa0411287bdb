"""A target and the drafter that was trained for it, loaded together."""

from dataclasses import dataclass
from pathlib import Path

from paceline.drafter.checkpoint import load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.head import TargetHead
from paceline.target.load import Target, load_target


@dataclass(frozen=True)
class Pair:
    """What decoding needs, on the target's device and in its type."""

    target: Target
    drafter: DFlash
    head: TargetHead
    """The target's, narrowed to what the drafter proposes."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.target.spec.eos_token_ids)


def load_pair(recipe: TargetRecipe, checkpoint: Path) -> Pair:
    """Load both. Raises TargetError where the drafter was trained for another target."""
    target = load_target(recipe)
    drafter = load_drafter(checkpoint, device=recipe.device)
    drafter.to(target.model.dtype)
    config, spec = drafter.config, target.spec
    if config.target_identity != spec.identity:
        raise TargetError(
            f"{checkpoint}: trained for {config.target_name} ({config.target_identity}), "
            f"which is not the target at {recipe.path} ({spec.identity}). A drafter serves the "
            "target it was trained for."
        )
    return Pair(target, drafter, drafter.narrowed(target.head))
