"""`paceline prepare`: data sets in, `corpus/prepared.jsonl` and `corpus/quarantine.jsonl` out."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.corpus.intake import Intake
from paceline.corpus.mask import Renderer, renderer_of
from paceline.corpus.tally import Tally, unread_words
from paceline.durable.errors import DataError
from paceline.recipe.corpus_inputs import later_settings
from paceline.recipe.data_files import data_files, is_text
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import source_fields
from paceline.recipe.stage import Report, StageRecord
from paceline.recipe.write import adopt_recipe
from paceline.rows.overlap import GRAM
from paceline.target.chat import (
    check_template_args,
    template_digest,
    tokenizer_digest,
    writes_date,
)
from paceline.target.template import RENDERED_BY, rendering_files
from paceline.types import Split
from paceline.watch.events import EventWriter

FORMAT_VERSION = 1
"""Of `prepared.jsonl`; part of the fingerprint."""


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Prepare the corpus, or find that it has been prepared.

    Raises DataError: a source is missing or of unknown form, no training row is left, all or none
    of the tokens are trainable, or `corpus.strict` and any row was rejected (the quarantine is
    written first). Raises TargetError for a target without a usable tokenizer or template,
    RecipeError for template arguments that Paceline sets itself, RecipeChanged where another
    recipe's corpus stands in the run directory.
    """
    with EventWriter(run_dir.events, "prepare") as events:
        return _run(recipe, run_dir, events)


def _run(recipe: Recipe, run_dir: RunDir, events: EventWriter) -> Report:
    for source in recipe.corpus.sources:
        data_files(source.path)
    check_template_args(recipe.corpus.template_args)
    files = rendering_files(Path(recipe.target.path), recipe.corpus.template_file)
    renderer = renderer_of(recipe)
    record = StageRecord(run_dir.corpus, "prepare", _fields(recipe, renderer), binds=False)
    if record.is_done():
        return Report(
            stage="prepare",
            skipped=True,
            numbers=record.report,
            lines=("prepare: already done with this recipe, and verified; nothing to do.",),
        )
    adopt_recipe(recipe, run_dir)
    record.begin()
    listed = quarantine_path(run_dir)
    intake = Intake(recipe, events)
    intake.write(run_dir.prepared, listed, partial(_refuse_useless, recipe, listed))
    numbers = {**_numbers(intake), RENDERED_BY: files}
    record.finish([run_dir.prepared, quarantine_path(run_dir)], numbers)
    events.emit("finished", intake.counts(is_all=True), report=numbers)
    lines = (*_lines(recipe, intake), *_warnings(recipe, renderer, intake.tally))
    if intake.tally.quarantined:
        lines = (*lines, f"rows left out are listed in {listed}")
    return Report(stage="prepare", numbers=numbers, lines=lines)


def quarantine_path(run_dir: RunDir) -> Path:
    """Where the rejected rows are listed."""
    return run_dir.corpus / "quarantine.jsonl"


def _fields(recipe: Recipe, renderer: Renderer) -> Fields:
    corpus = recipe.corpus
    return flatten(
        {
            "format": FORMAT_VERSION,
            **source_fields(recipe),
            "corpus": {
                "max_length": corpus.max_length,
                "max_prompt_length": corpus.max_prompt_length,
                "min_loss_tokens": corpus.min_loss_tokens,
                "validation_fraction": corpus.validation_fraction,
                "leading_assistant": corpus.leading_assistant,
                "last_turn_only": corpus.last_turn_only,
                "template_args": corpus.template_args,
                "strict": corpus.strict,
                "seed": corpus.seed,
                **later_settings(corpus),
            },
            "regenerate.enabled": recipe.regenerate.enabled,
            **_rendering(renderer),
        }
    )


def rendering_fields(recipe: Recipe) -> Fields:
    """What the target's folder says of template, tokenizer and end tokens, as `prepare` records it.

    Raises TargetError for a target without a usable tokenizer or template.
    """
    return flatten(_rendering(renderer_of(recipe)))


def _rendering(renderer: Renderer) -> dict[str, Any]:
    return {
        "template": template_digest(renderer.tokenizer),
        "tokenizer": tokenizer_digest(renderer.tokenizer),
        "end_tokens": sorted(renderer.end.ids),
    }


def _refuse_useless(recipe: Recipe, listed: Path, tally: Tally) -> None:
    reasons = ", ".join(f"{count} {reason}" for reason, count in tally.reasons.most_common())
    if recipe.corpus.strict and tally.quarantined:
        raise DataError(
            f"corpus.strict: {tally.quarantined} of {tally.read} rows were rejected "
            f"({reasons}). They are listed in {listed}: mend them, or set strict to false."
        )
    usable = tally.samples[Split.TRAIN] + tally.samples[Split.VALIDATION]
    if not usable:
        raise DataError(
            f"No training row is left: {tally.read} rows read, {tally.quarantined} rejected "
            f"({reasons or 'none'}). They are listed in {listed}."
        )
    if not tally.samples[Split.TRAIN]:
        raise DataError(
            f"All {usable} prompts fell into the validation split. Lower "
            "corpus.validation_fraction or give more rows."
        )
    if not recipe.regenerate.enabled and tally.trainable_share in (0.0, 1.0):
        raise DataError(
            f"{tally.trainable_share:.0%} of {tally.train_tokens} tokens are trainable, so "
            "prompts and answers are not told apart. Look at a sample with "
            "`paceline prepare --preview`, and at the target's chat template."
        )


def _numbers(intake: Intake) -> dict[str, Any]:
    overlap = {name: count.numbers() for name, count in intake.overlap.counts().items()}
    numbers = {**intake.tally.numbers(), "overlap": overlap}
    return {**numbers, "vocabulary": intake.coverage.numbers()}


def _lines(recipe: Recipe, intake: Intake) -> Iterator[str]:
    yield from intake.tally.lines()
    if not recipe.regenerate.enabled:
        yield f"{intake.tally.trainable_share:.1%} of the tokens are trainable"
    yield from intake.coverage.lines()
    for name, count in intake.overlap.counts().items():
        yield (
            f"overlap of {name} with the training prompts: {count.touched_prompts} of "
            f"{count.prompts} prompts share a run of {GRAM} words, "
            f"{count.shared_grams} of {count.grams} {GRAM}-grams"
        )


def _warnings(recipe: Recipe, renderer: Renderer, tally: Tally) -> Iterator[str]:
    for source in tally.sources:
        if not source.accepted:
            yield f"warning: nothing of {source.name} was accepted"
        for file, rows in source.torn.items():
            yield (
                f"warning: {file} of {source.name} breaks off after {rows} rows: how many are lost "
                "behind them nobody knows. Fetch the file again (torn_file)"
            )
        if source.unread:
            level = "warning" if any(map(is_text, source.unread)) else "note"
            yield f"{level}: {unread_words(source.name, source.unread)}"
    if recipe.corpus.validation_fraction > 0 and not tally.samples[Split.VALIDATION]:
        yield "warning: no prompt fell into the validation split"
    dated = writes_date(renderer.tokenizer, recipe.corpus.template_args)
    if dated:
        mended = "; corpus.template_args.date_string fixes it" if dated == "unless_given" else ""
        yield (
            "warning: the chat template may write today's date, so prompts depend on the day"
            f"{mended}"
        )
