"""What a training starts from: a new drafter, or another training's."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.drafter.build import choose_mask_token, drafter_config, is_mask_token, new_drafter
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.drafter.warm_start import read_source, start_from, warm_config
from paceline.durable.errors import RecipeError, UserError
from paceline.recipe.schema import Recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import default_taps
from paceline.target.template import special_token_ids, template_digest
from paceline.train.vocabulary import VocabularyCounts


def first_drafter(
    recipe: Recipe,
    spec: TargetSpec,
    taps: tuple[int, ...],
    counts: VocabularyCounts,
    *,
    used: Container[int],
) -> DFlash:
    """The drafter of step 0, on the CPU.

    `used` are the token ids of the corpus. Raises RecipeError where recipe, target and the drafter
    to start from do not fit together, ShardDamaged where that one is not as it was written.
    """
    path = Path(recipe.target.path)
    if recipe.drafter.warm_start is not None:
        source, config, _ = _warm(recipe, spec, taps)
        if not is_mask_token(config.mask_token_id, spec, used):
            raise RecipeError(
                f"drafter.warm_start: {recipe.drafter.warm_start} has the mask token "
                f"{config.mask_token_id}, which occurs in this corpus or is a pad, begin or end "
                "token of this target. Take those samples out, or leave warm_start out."
            )
        return start_from(source, config)
    mask = choose_mask_token(
        recipe.drafter.mask_token_id, spec, special_ids=special_token_ids(path), used=used
    )
    config = drafter_config(
        recipe.drafter,
        spec,
        taps,
        mask_token_id=mask,
        template_digest=template_digest(path),
        template_args=recipe.corpus.template_args,
    )
    vocabulary = counts.choose()
    return new_drafter(
        config, recipe.drafter, spec, path, seed=recipe.train.seed, vocabulary=vocabulary
    )


@dataclass(frozen=True)
class Remarks:
    """What a training says of its start, when it begins and in its report."""

    numbers: dict[str, Any]
    """JSON values: `draft_vocabulary`, `warm_start`, each where there is one."""
    lines: tuple[str, ...]
    """Sentences."""


def remarks_on(
    recipe: Recipe,
    spec: TargetSpec,
    taps: tuple[int, ...],
    counts: VocabularyCounts,
    drafter: DFlash,
) -> Remarks:
    """What a reduced vocabulary covers, and what differs from the drafter started from.

    The same for a resumed training as for a fresh one. Raises as `first_drafter` does.
    """
    numbers: dict[str, Any] = {}
    lines: list[str] = []
    if recipe.drafter.warm_start is not None:
        _, _, notes = _warm(recipe, spec, taps)
        numbers["warm_start"] = {"from": recipe.drafter.warm_start, "notes": list(notes)}
        lines += [f"started from {recipe.drafter.warm_start}", *notes]
    vocabulary = drafter.vocabulary
    if vocabulary is not None:
        covered = counts.report(vocabulary)
        numbers["draft_vocabulary"] = covered.numbers()
        lines += covered.lines()
    return Remarks(numbers, tuple(lines))


def check_warm_start(recipe: Recipe) -> tuple[str, ...]:
    """Refuse, before any work, a warm start that the training would refuse.

    Returns what differs although it fits; nothing where the recipe has no warm start. Reads the
    drafter and the target's files. A target that is broken, or too small for the taps, is left to
    the stage that reads it first.
    """
    if recipe.drafter.warm_start is None:
        return ()
    try:
        spec = read_spec(Path(recipe.target.path))
        taps = recipe.extract.taps or default_taps(spec.num_layers, recipe.extract.num_taps)
    except UserError:
        return ()
    return _warm(recipe, spec, taps)[2]


def _warm(
    recipe: Recipe, spec: TargetSpec, taps: tuple[int, ...]
) -> tuple[DFlash, DrafterConfig, tuple[str, ...]]:
    folder = Path(recipe.drafter.warm_start or "")
    source = read_source(folder)
    config, notes = warm_config(
        source.config,
        folder,
        recipe.drafter,
        spec,
        taps,
        template_digest=template_digest(Path(recipe.target.path)),
        template_args=recipe.corpus.template_args,
    )
    return source, config, notes
