"""Which prompts are scored: those of `score.datasets`, or the corpus' own held-out ones."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.durable.errors import DataError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import ScoreSettings, score_settings
from paceline.recipe.sources import name_of
from paceline.score.datasets import dataset_prompts
from paceline.score.job import Prompt, lot
from paceline.target.spec import read_spec
from paceline.types.sample import Sample, Split, read_samples

_LOG = logging.getLogger(__name__)


def choose_prompts(recipe: Recipe, run_dir: RunDir) -> list[Prompt]:
    """The prompts that the recipe asks for; without any, those of the validation samples.

    Raises DataError where there is none that the target has room for, and for a row of a data set
    that cannot be read.
    """
    settings = score_settings(recipe.score)
    block = recipe.drafter.block_size
    # A tree of any budget reaches no further than a block.
    room = read_spec(Path(recipe.target.path)).max_position - settings.max_new_tokens - block
    if recipe.score.datasets:
        chosen = dataset_prompts(recipe, room=room)
    else:
        chosen = _corpus_prompts(recipe, run_dir, room, settings)
    return _mark_checked(chosen, recipe.score.walk_check_prompts)


def not_scored(recipe: Recipe, run_dir: RunDir, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """A sentence for each held-out data set of the corpus of which nothing is scored."""
    if recipe.score.datasets:
        return ()
    scored = {prompt.dataset for prompt in prompts}
    most = score_settings(recipe.score).max_new_tokens
    return tuple(
        f"{name_of(source)}: none of its prompts is scored. They are not in the corpus "
        f"({run_dir.corpus / 'quarantine.jsonl'} says why), or leave the target no room for an "
        f"answer of score.max_new_tokens {most}."
        for source in recipe.corpus.sources
        if source.split == "heldout" and name_of(source) not in scored
    )


def _corpus_prompts(
    recipe: Recipe, run_dir: RunDir, room: int, settings: ScoreSettings
) -> list[Prompt]:
    by_split: dict[Split, dict[str, list[Sample]]] = {split: {} for split in Split}
    for sample in read_samples(run_dir.samples(recipe)):
        if sample.split is not Split.TRAIN:
            by_split[sample.split].setdefault(sample.source, []).append(sample)
    datasets = by_split[Split.HELDOUT] or by_split[Split.VALIDATION]
    chosen: list[Prompt] = []
    too_long = 0
    for name in sorted(datasets):
        usable = [(s, p) for s in datasets[name] if len(p := _prompt_ids(s)) <= room]
        too_long += len(datasets[name]) - len(usable)
        usable.sort(key=lambda pair: lot(settings.seed, pair[0].prompt_id))
        for sample, ids in usable[: settings.max_prompts]:
            chosen.append(
                Prompt(
                    prompt_id=sample.prompt_id,
                    dataset=name,
                    domain=name,
                    input_ids=ids,
                    messages=tuple(sample.messages),
                    check_walk=False,
                )
            )
    if too_long and not chosen:
        raise DataError(
            f"score: all {too_long} held-out prompts are too long: of the target's positions "
            f"{max(room, 0)} are left for a prompt beside score.max_new_tokens "
            f"{settings.max_new_tokens} and a block. Lower it, or give shorter ones."
        )
    if too_long:
        _LOG.warning(
            "%d held-out prompts are left out: longer than the %d tokens that the target has room "
            "for beside its answer", too_long, room,
        )  # fmt: skip
    if not chosen:
        raise DataError(
            "score: no held-out prompts. Give a source with `split: heldout`, data sets of its own "
            "(score.datasets), or a corpus.validation_fraction above 0."
        )
    return chosen


def _mark_checked(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Spread the prompts whose walk is proved by decoding over all data sets."""
    count = min(count, len(prompts))
    marked = {number * len(prompts) // count for number in range(count)}
    return [replace(p, check_walk=i in marked) for i, p in enumerate(prompts)]


def _prompt_ids(sample: Sample) -> tuple[int, ...]:
    """The tokens before the first that the target generated."""
    end = sample.loss_spans[0][0] if sample.loss_spans else len(sample.input_ids)
    return tuple(sample.input_ids[:end])
