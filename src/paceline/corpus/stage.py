"""`paceline prepare`: data sets in, `corpus/prepared.jsonl` and `corpus/quarantine.jsonl` out."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.corpus.formats import RawRow, check_source, read_rows
from paceline.corpus.mask import Renderer
from paceline.corpus.overlap import GRAM, Overlap
from paceline.corpus.quarantine import Quarantine
from paceline.corpus.rows import Accepted, Rejected, RowPreparer
from paceline.corpus.tally import SourceTally, Tally
from paceline.corpus.template import (
    check_template_args,
    load_tokenizer,
    template_digest,
    tokenizer_digest,
)
from paceline.durable.errors import DataError
from paceline.durable.fs import REAL_FS, atomic_file
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, SourceRecipe
from paceline.recipe.sources import name_of, source_fields
from paceline.recipe.stage import Report, StageRecord
from paceline.recipe.write import adopt_recipe
from paceline.target.template import RENDERED_BY, rendering_files
from paceline.types import Split
from paceline.types.sample import encode_sample
from paceline.watch.events import Counts, EventWriter

FORMAT_VERSION = 1
"""Of `prepared.jsonl`; part of the fingerprint."""

_PROGRESS_SECONDS = 2.0


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Prepare the corpus, or find that it has been prepared.

    Held-out sources come first in the file, because their prompts are kept out of training;
    within the two groups rows stay in the order of recipe and file. Of equal samples the first
    is kept. Memory grows by about 100 bytes per sample (its id), not with the text.

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
        check_source(Path(source.path))
    check_template_args(recipe.corpus.template_args)
    files = rendering_files(Path(recipe.target.path))
    renderer = _renderer(recipe)
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
    work = _Work(recipe, renderer, events)
    work.write(run_dir)
    numbers = {**work.numbers(), RENDERED_BY: files}
    record.finish([run_dir.prepared, quarantine_path(run_dir)], numbers)
    events.emit("finished", work.counts(is_all=True), report=numbers)
    lines = (*work.lines(), *_warnings(recipe, renderer, work.tally))
    if work.tally.quarantined:
        lines = (*lines, f"rows left out are listed in {quarantine_path(run_dir)}")
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
            },
            "regenerate.enabled": recipe.regenerate.enabled,
            **_rendering(renderer),
        }
    )


def rendering_fields(recipe: Recipe) -> Fields:
    """What the target's folder says of template, tokenizer and end tokens, as `prepare` records it.

    Raises TargetError for a target without a usable tokenizer or template.
    """
    return flatten(_rendering(_renderer(recipe)))


def _rendering(renderer: Renderer) -> dict[str, Any]:
    return {
        "template": template_digest(renderer.tokenizer),
        "tokenizer": tokenizer_digest(renderer.tokenizer),
        "end_tokens": sorted(renderer.end.ids),
    }


def _renderer(recipe: Recipe) -> Renderer:
    tokenizer = load_tokenizer(recipe.target.path)
    return Renderer.of(tokenizer, recipe.corpus.template_args, Path(recipe.target.path))


class _Work:
    """One pass over all sources."""

    def __init__(self, recipe: Recipe, renderer: Renderer, events: EventWriter) -> None:
        self.tally = Tally()
        self._recipe = recipe
        self._rows = RowPreparer(renderer, recipe.corpus, recipe.regenerate.enabled)
        self._events = events
        self._overlap = Overlap()
        self._seen: set[bytes] = set()
        self._heldout_prompts: set[bytes] = set()
        self._start = self._reported = time.monotonic()

    def write(self, run_dir: RunDir) -> None:
        """Write both files; the quarantine stands even where the corpus is refused."""
        sources = [name_of(source) for source in self._recipe.corpus.sources]
        self._events.emit("start", self.counts(), sources=sources)
        refusal: DataError | None = None
        with atomic_file(quarantine_path(run_dir)) as rejected:
            quarantine = Quarantine(rejected)
            try:
                with atomic_file(run_dir.prepared) as prepared:
                    sources = self._recipe.corpus.sources
                    for source in sorted(sources, key=lambda s: s.split != "heldout"):
                        self._source(source, prepared, quarantine)
                    self._refuse_useless(quarantine_path(run_dir))
            except DataError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _source(self, source: SourceRecipe, prepared: BinaryIO, quarantine: Quarantine) -> None:
        name = name_of(source)
        tally = SourceTally(name)
        self.tally.sources.append(tally)
        for row in read_rows(Path(source.path), source.limit):
            tally.read += 1
            if row.is_blank:
                tally.blank += 1
                continue
            outcome = self._outcome(row, source, name)
            if isinstance(outcome, Rejected):
                tally.reasons[outcome.reason] += 1
                quarantine.add(name, source.path, row, outcome)
            else:
                REAL_FS.write(prepared, encode_sample(outcome.sample))
                tally.accepted += 1
                self.tally.accept(outcome.sample, truncated=outcome.truncated)
                self._remember(outcome)
            self._progress()
        tally.check()

    def _outcome(self, row: RawRow, source: SourceRecipe, name: str) -> Accepted | Rejected:
        if row.fault is not None:
            return Rejected(row.fault.reason, row.fault.detail)
        outcome = self._rows.prepare(row.value or {}, name, heldout=source.split == "heldout")
        if isinstance(outcome, Rejected):
            return outcome
        sample = outcome.sample
        in_heldout = bytes.fromhex(sample.prompt_id) in self._heldout_prompts
        if sample.split is not Split.HELDOUT and in_heldout:
            return Rejected("in_heldout", "a held-out prompt", sample.sample_id, sample.prompt_id)
        if bytes.fromhex(sample.sample_id) in self._seen:
            return Rejected("duplicate", "kept before", sample.sample_id, sample.prompt_id)
        return outcome

    def _remember(self, accepted: Accepted) -> None:
        sample = accepted.sample
        self._seen.add(bytes.fromhex(sample.sample_id))
        if sample.split is Split.HELDOUT:
            self._heldout_prompts.add(bytes.fromhex(sample.prompt_id))
            self._overlap.add_heldout(sample.source, sample.messages)
        elif sample.split is Split.TRAIN:
            self._overlap.add_train(sample.messages)

    def _refuse_useless(self, listed: Path) -> None:
        tally = self.tally
        reasons = ", ".join(f"{count} {reason}" for reason, count in tally.reasons.most_common())
        if self._recipe.corpus.strict and tally.quarantined:
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
        if not self._recipe.regenerate.enabled and tally.trainable_share in (0.0, 1.0):
            raise DataError(
                f"{tally.trainable_share:.0%} of {tally.train_tokens} tokens are trainable, so "
                "prompts and answers are not told apart. Look at a sample with "
                "`paceline prepare --preview`, and at the target's chat template."
            )

    def counts(self, *, is_all: bool = False) -> Counts:
        """For events; how many rows there are in all shows at the end alone."""
        tally = self.tally
        tokens = tally.tokens.total()
        seconds = time.monotonic() - self._start
        return Counts(
            unit="rows",
            total=tally.read if is_all else None,
            done=tally.read,
            quarantined=dict(tally.reasons),
            tokens=tokens,
            tokens_total=tokens if is_all else None,
            rate=round(tokens / seconds, 1) if tokens else None,
            eta=0.0 if is_all else None,
        )

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self._events.emit("progress", self.counts(), source=self.tally.sources[-1].name)

    def numbers(self) -> dict[str, Any]:
        """The report."""
        overlap = {name: count.numbers() for name, count in self._overlap.counts().items()}
        return {**self.tally.numbers(), "overlap": overlap}

    def lines(self) -> Iterator[str]:
        """The report, for the terminal."""
        yield from self.tally.lines()
        if not self._recipe.regenerate.enabled:
            yield f"{self.tally.trainable_share:.1%} of the tokens are trainable"
        for name, count in self._overlap.counts().items():
            yield (
                f"overlap of {name} with the training prompts: {count.touched_prompts} of "
                f"{count.prompts} prompts share a run of {GRAM} words, "
                f"{count.shared_grams} of {count.grams} {GRAM}-grams"
            )


def _warnings(recipe: Recipe, renderer: Renderer, tally: Tally) -> Iterator[str]:
    for source in tally.sources:
        if not source.accepted:
            yield f"warning: nothing of {source.name} was accepted"
    if recipe.corpus.validation_fraction > 0 and not tally.samples[Split.VALIDATION]:
        yield "warning: no prompt fell into the validation split"
    template = str(renderer.tokenizer.chat_template)
    if "strftime_now" in template:
        if "date_string" not in template:
            yield "warning: the chat template may write today's date, so prompts depend on the day"
        elif "date_string" not in recipe.corpus.template_args:
            yield (
                "warning: the chat template may write today's date, so prompts depend on the day; "
                "corpus.template_args.date_string fixes it"
            )
