"""What `prepare` would make of data: the pass itself, into a folder that is thrown away."""

import dataclasses
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from paceline.corpus.coverage import TokenCoverage
from paceline.corpus.intake import Intake
from paceline.corpus.lint.gallery import Gallery
from paceline.corpus.lint.languages import Languages
from paceline.corpus.lint.left_out import Reason, read_reasons
from paceline.corpus.lint.measure import Measure
from paceline.corpus.lint.shown import Shown, shown
from paceline.corpus.lint.template_facts import TemplateFacts, template_facts
from paceline.corpus.mask import Renderer, renderer_of
from paceline.corpus.preview import decoded
from paceline.corpus.tally import Tally
from paceline.recipe.data_files import data_files
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import name_of
from paceline.rows.overlap import OverlapCount
from paceline.target.chat import check_template_args
from paceline.types import Split
from paceline.types.sample import read_samples

_TOKENS = 24
"""Frequent tokens that are told by name."""


@dataclass(frozen=True)
class Lint:
    """All that is known of the data."""

    recipe: Recipe
    """What was asked for, with what was found: `regenerate.enabled` where no row has an answer."""
    found_prompts: bool
    """Whether answers were asked for, and no row has one: the prompts were looked at instead."""
    tally: Tally
    overlap: dict[str, OverlapCount]
    measure: Measure
    coverage: TokenCoverage
    languages: dict[str, Counter[str]]
    reasons: list[Reason]
    samples: list[Shown]
    template: TemplateFacts
    vocabulary: int
    """Ids that the tokenizer knows."""
    first_tokens: list[tuple[str, int]]
    """What answers begin with, and how often; the most frequent first."""
    frequent_tokens: list[tuple[str, int]]
    """Trained tokens, and how often; the most frequent first."""

    @property
    def prompts_only(self) -> bool:
        """Whether the target will answer, so that nothing but prompts is looked at."""
        return self.recipe.regenerate.enabled

    @property
    def heldout(self) -> frozenset[str]:
        """Sources that are evaluated on."""
        sources = self.recipe.corpus.sources
        return frozenset(name_of(source) for source in sources if source.split == "heldout")


def lint(recipe: Recipe, *, may_be_prompts: bool = False) -> Lint:
    """Look at the data of a recipe as `prepare` would see it.

    With `may_be_prompts`, where answers are asked for and no row has one, the prompts are looked at
    as if `regenerate.enabled` were set.

    Raises DataError, TargetError and RecipeError as `prepare` does for sources that cannot be
    read, a target without tokenizer or template, and template arguments that are not the user's.
    """
    for source in recipe.corpus.sources:
        data_files(source.path)
    check_template_args(recipe.corpus.template_args)
    renderer = renderer_of(recipe)
    with tempfile.TemporaryDirectory(prefix="paceline-lint-") as folder:
        result = _lint(recipe, renderer, Path(folder))
        if not (may_be_prompts and _has_prompts_alone(result)):
            return result
        asked = dataclasses.replace(recipe.regenerate, enabled=True)
        recipe = dataclasses.replace(recipe, regenerate=asked)
        again = _lint(recipe, renderer, Path(folder))
        return dataclasses.replace(again, found_prompts=True)


def _has_prompts_alone(result: Lint) -> bool:
    if result.prompts_only:
        return False
    trained = [s for s in result.tally.sources if s.name not in result.heldout]
    return not any(s.accepted for s in trained) and any(s.reasons["no_answer"] for s in trained)


def _lint(recipe: Recipe, renderer: Renderer, folder: Path) -> Lint:
    prepared, quarantine = folder / "prepared.jsonl", folder / "quarantine.jsonl"
    intake = Intake(recipe)
    intake.write(prepared, quarantine, lambda _: None)
    tokenizer = renderer.tokenizer
    measure, gallery = Measure(renderer.end.ids), Gallery()
    languages = Languages(tokenizer)
    for sample in read_samples(prepared):
        measure.add(sample, recipe.corpus.max_length)
        gallery.add(sample)
        languages.add(sample)

    def spelled(counts: Counter[int]) -> list[tuple[str, int]]:
        first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_TOKENS]
        return [(decoded([token], tokenizer), count) for token, count in first]

    trained = Counter({i: int(n) for i, n in enumerate(intake.coverage.counts()) if n})
    return Lint(
        recipe=recipe,
        found_prompts=False,
        tally=intake.tally,
        overlap=intake.overlap.counts(),
        measure=measure,
        coverage=intake.coverage,
        languages=languages.counts(),
        reasons=read_reasons(quarantine),
        samples=shown(gallery.chosen(), tokenizer),
        template=template_facts(recipe, renderer),
        vocabulary=len(tokenizer),
        first_tokens=spelled(measure.first_tokens),
        frequent_tokens=spelled(trained),
    )


def trained_samples(result: Lint) -> int:
    """Samples of training and validation together."""
    return result.tally.samples[Split.TRAIN] + result.tally.samples[Split.VALIDATION]
