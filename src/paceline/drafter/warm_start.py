"""A new drafter that starts from the weights of a trained one.

docs/algorithms.md, "Warm start".
"""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from paceline.drafter.build import drafter_config
from paceline.drafter.checkpoint import (
    CONFIG,
    WEIGHTS,
    check_sums,
    load_drafter,
    read_config,
)
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import RecipeError, ShardDamaged
from paceline.recipe.checkpoints import SUMS
from paceline.recipe.schema import DrafterRecipe
from paceline.target.spec import TargetSpec
from paceline.types.layers import LayerConvention

_FREE = frozenset(
    {
        "block_size",
        "max_position",
        "layer_convention",
        "target_name",
        "target_identity",
        "template_digest",
        "template_args",
    }
)
"""Fields that may differ: no weight's meaning depends on them, or they are translated."""

_RECIPE_KEYS = {
    "num_layers": "drafter.layers",
    "taps": "extract.taps",
    "draft_vocab_size": "drafter.draft_vocab",
}


def read_source(folder: Path) -> DFlash:
    """The drafter to start from, on the CPU.

    Raises UserError where there is none, ShardDamaged where its files are not as they were
    written; a training's checkpoint is held against its own checksums.
    """
    if (folder / SUMS).exists():
        check_sums(folder, (WEIGHTS, CONFIG))
    return load_drafter(folder)


def check_source(folder: Path) -> DrafterConfig:
    """The config of the drafter to start from; its weights are proved, not loaded.

    Weights without checksums can only be proved by loading them. Raises as `read_source` does.
    """
    if not (folder / SUMS).exists():
        return load_drafter(folder).config
    check_sums(folder, (WEIGHTS, CONFIG))
    return read_config(folder)


def warm_config(
    source: DrafterConfig,
    folder: Path,
    recipe: DrafterRecipe,
    spec: TargetSpec,
    taps: tuple[int, ...],
    *,
    template_digest: str,
    template_args: dict[str, Any],
) -> tuple[DrafterConfig, tuple[str, ...]]:
    """The config of a drafter that starts from `source`, and what differs although it fits.

    The source's mask token and draft vocabulary are kept. Its block size may differ, and so may
    its target, as long as that has the same shape: a fine-tuned one is the usual reason.

    Raises RecipeError that lists each field in which the source is not what recipe and target
    ask for.
    """
    asked = recipe
    if recipe.draft_vocab is None:
        asked = dataclasses.replace(recipe, draft_vocab=source.draft_vocab_size)
    mask = source.mask_token_id if recipe.mask_token_id is None else recipe.mask_token_id
    wanted = drafter_config(
        asked,
        spec,
        taps,
        mask_token_id=mask,
        template_digest=template_digest,
        template_args=template_args,
    )
    have, want = _comparable(source, folder), _comparable(wanted, folder)
    different = [name for name in want if have[name] != want[name] and name not in _FREE]
    if have["rope"].get("rope_type") != "default" and have["max_position"] != want["max_position"]:
        different.append("max_position")  # scaled kinds turn by it
    if different:
        rows = "\n  ".join(f"{_in_words(n)}: {have[n]!r} -> {want[n]!r}" for n in different)
        raise RecipeError(
            f"drafter.warm_start: {folder} is not the drafter that recipe and target ask for "
            f"(source -> asked):\n  {rows}\n"
            "Put the source's values into the recipe, or leave warm_start out."
        )
    return wanted, tuple(_notes(have, want, folder))


def start_from(source: DFlash, config: DrafterConfig) -> DFlash:
    """A new drafter of `config` with the source's weights, fp32, and its vocabulary."""
    drafter = DFlash(config, source.vocabulary)
    drafter.load_state_dict(source.state_dict())
    return drafter


def _comparable(config: DrafterConfig, folder: Path) -> dict[str, Any]:
    """The fields as JSON values; layer ids in our convention, without what has no effect."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    try:
        own = LayerConvention(config.layer_convention).to_own(config.taps)
    except ValueError as error:
        raise ShardDamaged(f"{folder / CONFIG}: layer_convention: {error}.") from error
    kinds = config.layer_types or ("full",) * config.num_layers
    if "sliding" not in kinds:
        values |= {"sliding_window": None, "sliding_in_block_mask": None}
    return values | {"taps": list(own), "layer_types": list(kinds)}


def _notes(have: dict[str, Any], want: dict[str, Any], folder: Path) -> list[str]:
    found = []
    if have["target_identity"] != want["target_identity"]:
        found.append(
            f"{folder} was trained for another target: {have['target_name']} "
            f"({have['target_identity']}), here it is {want['target_name']} "
            f"({want['target_identity']})."
        )
    if have["block_size"] != want["block_size"]:
        found.append(
            f"{folder} was trained with blocks of {have['block_size']}, here they have "
            f"{want['block_size']}."
        )
    if (have["template_digest"], have["template_args"]) != (
        want["template_digest"],
        want["template_args"],
    ):
        found.append(f"{folder} was trained with another chat template, or other arguments of it.")
    return [f"drafter.warm_start: {sentence}" for sentence in found]


def _in_words(name: str) -> str:
    if name in _RECIPE_KEYS:
        return _RECIPE_KEYS[name]
    asked = {field.name for field in dataclasses.fields(DrafterRecipe)}
    return f"drafter.{name}" if name in asked else f"{name} (of the target)"
