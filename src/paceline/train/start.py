"""What a training starts from: a new drafter, or another training's."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.drafter.build import choose_mask_token, drafter_config, is_mask_token, new_drafter
from paceline.drafter.checkpoint import read_config
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.drafter.warm_start import check_source, read_source, start_from, warm_config
from paceline.durable.errors import RecipeError, UserError
from paceline.recipe.schema import Recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import taps_of
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
        source = read_source(Path(recipe.drafter.warm_start))
        config, _ = _warm_config(recipe, spec, taps, source.config)
        _require_mask_token(recipe, spec, config, used)
        return start_from(source, config)
    mask = choose_mask_token(
        recipe.drafter.mask_token_id, spec, special_ids=special_token_ids(path), used=used
    )
    config = drafter_config(
        recipe.drafter,
        spec,
        taps,
        mask_token_id=mask,
        template_digest=template_digest(path, recipe.corpus.template_file),
        template_args=recipe.corpus.template_args,
    )
    vocabulary = counts.choose()
    return new_drafter(
        config, recipe.drafter, spec, path, seed=recipe.train.seed, vocabulary=vocabulary
    )


@dataclass(frozen=True)
class Remarks:
    """What a training says of its start: warnings when it begins, facts in its report."""

    numbers: dict[str, Any]
    """JSON values: `draft_vocabulary`, `warm_start`, each where there is one."""
    warnings: tuple[str, ...]
    """Sentences for the log, whose level says what they are."""
    facts: tuple[str, ...]
    """Sentences for the report."""


def remarks_on(
    recipe: Recipe,
    spec: TargetSpec,
    taps: tuple[int, ...],
    counts: VocabularyCounts,
    drafter: DFlash,
) -> Remarks:
    """What a reduced vocabulary covers, and what differs from the drafter started from.

    The same for a resumed training as for a fresh one. Raises as `first_drafter` does, which has
    proved the weights: of the drafter started from only the config is read here.
    """
    numbers: dict[str, Any] = {}
    warnings: list[str] = []
    facts: list[str] = []
    if recipe.drafter.warm_start is not None:
        source = read_config(Path(recipe.drafter.warm_start))
        _, notes = _warm_config(recipe, spec, taps, source)
        numbers["warm_start"] = {"from": recipe.drafter.warm_start, "notes": list(notes)}
        facts += [f"started from {recipe.drafter.warm_start}", *notes]
    vocabulary = drafter.vocabulary
    if vocabulary is not None:
        covered = counts.report(vocabulary)
        numbers["draft_vocabulary"] = covered.numbers()
        facts.append(covered.fact())
        warnings += [*covered.warnings(), *_lost_ends(vocabulary, spec)]
    return Remarks(numbers, tuple(warnings), tuple(facts))


def _lost_ends(vocabulary: DraftVocabulary, spec: TargetSpec) -> Iterator[str]:
    """A warning where the vocabulary of another target's drafter lacks this one's end tokens."""
    lost = [i for i in spec.eos_token_ids if i < spec.tokenizer_size and not vocabulary.t2d[i]]
    if lost:
        one = len(lost) == 1
        yield (
            f"the draft vocabulary lacks {'the end token' if one else 'the end tokens'} "
            f"{', '.join(map(str, lost))} of this target: the last round of every answer that ends "
            f"with {'it' if one else 'one of them'} is lost. Leave drafter.warm_start out to have "
            "a vocabulary chosen that has every end token."
        )


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
        taps = taps_of(recipe.extract, spec.num_layers)
    except UserError:
        return ()
    source = check_source(Path(recipe.drafter.warm_start))
    config, notes = _warm_config(recipe, spec, taps, source)
    _require_mask_token(recipe, spec, config, used=())
    return notes


def _require_mask_token(
    recipe: Recipe, spec: TargetSpec, config: DrafterConfig, used: Container[int]
) -> None:
    if not is_mask_token(config.mask_token_id, spec, used):
        raise RecipeError(
            f"drafter.warm_start: {recipe.drafter.warm_start} has the mask token "
            f"{config.mask_token_id}, which occurs in this corpus or is a pad, begin or end "
            "token of this target. Take those samples out, or leave warm_start out."
        )


def _warm_config(
    recipe: Recipe, spec: TargetSpec, taps: tuple[int, ...], source: DrafterConfig
) -> tuple[DrafterConfig, tuple[str, ...]]:
    return warm_config(
        source,
        Path(recipe.drafter.warm_start or ""),
        recipe.drafter,
        spec,
        taps,
        template_digest=template_digest(Path(recipe.target.path), recipe.corpus.template_file),
        template_args=recipe.corpus.template_args,
    )
