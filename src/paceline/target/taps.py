"""Which layers are tapped. Ids mean output after decoder layer i, 0-based."""

from collections.abc import Sequence

from paceline.durable.errors import RecipeError
from paceline.recipe.schema import ExtractRecipe


def taps_of(recipe: ExtractRecipe, num_layers: int) -> tuple[int, ...]:
    """The layers that a recipe taps. Raises RecipeError where they do not fit the target."""
    if recipe.taps is None:
        return default_taps(num_layers, recipe.num_taps)
    check_taps(recipe.taps, num_layers)
    return recipe.taps


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Ids spread evenly from layer 1 to the third from the end (docs/algorithms.md, "DFlash").

    One tap is the middle layer. Raises RecipeError where so many do not fit.
    """
    if num_taps < 1:
        raise RecipeError(f"extract.num_taps: {num_taps}; at least one layer has to be tapped.")
    if num_taps == 1:
        taps = (num_layers // 2,)
    else:
        span = num_layers - 4
        taps = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers - 1:
        raise RecipeError(
            f"extract.num_taps: {num_taps} taps do not fit into a target with {num_layers} layers, "
            "spread from the second to the third from the end. Ask for fewer, or name them in "
            "extract.taps."
        )
    return taps


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise RecipeError unless ids are rising, in range, and leave out the last layer.

    Engines disagree whether the last layer's output is normed, so it is never a tap.
    """
    if not taps:
        raise RecipeError("extract.taps: empty; at least one layer has to be tapped.")
    if list(taps) != sorted(set(taps)):
        raise RecipeError(f"extract.taps: {tuple(taps)} must rise strictly, each layer once.")
    if taps[0] < 0 or taps[-1] >= num_layers:
        raise RecipeError(
            f"extract.taps: {tuple(taps)} go beyond the target's layers 0..{num_layers - 1}. Name "
            "others, or give null to have extract.num_taps of them chosen."
        )
    if taps[-1] == num_layers - 1:
        raise RecipeError(
            f"extract.taps: {taps[-1]} is the last layer, which engines put out normed or not. "
            f"Tap at most layer {num_layers - 2}, and set extract.last for what lm_head reads."
        )
