"""One pass over all sources: every row goes into the corpus or, with a reason, into quarantine."""

import logging
import os
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from paceline.corpus.coverage import TokenCoverage
from paceline.corpus.mixture import Candidate, is_mixed, left_out, mixture_key
from paceline.corpus.quarantine import Quarantine
from paceline.corpus.row_worker import Chunk, Job, Ready, tokenise
from paceline.corpus.rows import Rejected
from paceline.corpus.tally import SourceTally, Tally
from paceline.durable.errors import DataError
from paceline.durable.fs import REAL_FS, atomic_file
from paceline.flow.stream import map_stream
from paceline.recipe.data_files import data_files, unread_files
from paceline.recipe.schema import Recipe, SourceRecipe
from paceline.recipe.sources import name_of
from paceline.rows.formats import read_rows
from paceline.rows.overlap import Overlap
from paceline.rows.raw_row import TORN, RawRow
from paceline.types import Split
from paceline.watch.events import Counts, EventWriter

_CHUNK_ROWS = 64
_CHUNK_BYTES = 256 << 10
"""Rows that are handed to a process together: as many, or as many bytes."""

_WORTH_A_PROCESS = 8 << 20
"""Bytes of data below which starting other processes takes longer than the work."""

_MOST_PROCESSES = 32

_MOST_KINDS = 32
"""Kinds of content that are counted by name: they come from the data, and a report is no list."""

_PROGRESS_SECONDS = 2.0
_LOG_SECONDS = 15.0

_LOG = logging.getLogger(__name__)


class Intake:
    """The pass, and what it counts.

    Held-out sources come first, because their prompts are kept out of training; within the two
    groups rows stay in the order of recipe and file. Of equal samples the first is kept. Memory
    grows by 100 to 200 bytes per sample (its ids), not with the text.
    """

    def __init__(self, recipe: Recipe, events: EventWriter | None = None) -> None:
        self.tally = Tally()
        self.overlap = Overlap()
        self.coverage = TokenCoverage()
        self._recipe = recipe
        self._events = events
        self._kinds: set[str] = set()
        self._seen: set[bytes] = set()
        self._prompts: set[bytes] = set()
        self._heldout_prompts: set[bytes] = set()
        self._start = self._reported = self._logged = time.monotonic()

    def write(self, prepared: Path, quarantined: Path, check: Callable[[Tally], None]) -> None:
        """Write both files; the quarantine stands even where `check` refuses the corpus.

        `check` looks at the counts at the end and raises DataError. Raises DataError where a
        source cannot be read as a whole.
        """
        names = [name_of(source) for source in self._recipe.corpus.sources]
        if self._events is not None:
            self._events.emit("start", self.counts(), sources=names)
        refusal: DataError | None = None
        with atomic_file(quarantined) as rejected:
            quarantine = Quarantine(rejected)
            try:
                with atomic_file(prepared) as corpus:
                    self._pass(prepared.parent, corpus, quarantine)
                    check(self.tally)
            except DataError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _pass(self, folder: Path, corpus: BinaryIO, quarantine: Quarantine) -> None:
        recipe = self._recipe.corpus
        order = sorted(
            range(len(recipe.sources)), key=lambda n: recipe.sources[n].split != "heldout"
        )
        tallies = {number: _tally_of(recipe.sources[number]) for number in order}
        self.tally.sources += tallies.values()
        if not is_mixed(recipe.sources):
            self._read(
                tallies, quarantine, lambda number, _, row: self._take(row, tallies[number], corpus)
            )
        else:
            # Without a name: whatever ends this process, nothing is left of it.
            with tempfile.TemporaryFile(dir=folder) as aside:
                candidates: list[Candidate] = []

                def put_aside(number: int, raw: RawRow, row: Ready) -> None:
                    key = mixture_key(recipe.seed, row.lines[-1].sample_id)
                    candidates.append(Candidate(number, key, len(row.lines)))
                    pickle.dump((replace(raw, value=None), row), aside, pickle.HIGHEST_PROTOCOL)

                self._read(tallies, quarantine, put_aside)
                aside.seek(0)
                self._mix(candidates, aside, tallies, corpus, quarantine)
        for tally in tallies.values():
            tally.check()

    def _read(
        self,
        tallies: dict[int, SourceTally],
        quarantine: Quarantine,
        accept: Callable[[int, RawRow, Ready], None],
    ) -> None:
        sources = self._recipe.corpus.sources
        job = Job(self._recipe, grams=any(source.split == "heldout" for source in sources))
        waiting: deque[tuple[int, list[RawRow]]] = deque()
        chunks = _chunks([(number, sources[number]) for number in tallies], waiting)
        results = map_stream(
            tokenise, job, chunks, workers=self._workers(), name=lambda chunk: chunk.name
        )
        with closing(results):
            for outcomes in results:
                number, rows = waiting.popleft()
                source, tally = sources[number], tallies[number]
                following = iter(outcomes)
                for row in rows:
                    file = _short_name(row.file, source)
                    is_torn = row.fault is not None and row.fault.reason == TORN
                    tally.see(file, is_torn=is_torn)
                    if row.is_blank:
                        tally.blank += 1
                        continue
                    outcome = self._outcome(row, following, source)
                    if isinstance(outcome, Rejected):
                        outcome = self._named(outcome)
                        tally.leave_out(outcome.reason, file)
                        quarantine.add(tally.name, row, outcome)
                        continue
                    self._remember(outcome, source)
                    accept(number, row, outcome)
                self._progress(tally.name)

    def _workers(self) -> int:
        asked = self._recipe.corpus.workers
        if asked is not None:
            return asked
        files = [file for s in self._recipe.corpus.sources for file in data_files(s.path)]
        size = sum(file.stat().st_size for file in files)
        return min(_cores(), _MOST_PROCESSES) if size >= _WORTH_A_PROCESS else 1

    def _outcome(
        self, row: RawRow, results: Iterator[Ready | Rejected], source: SourceRecipe
    ) -> Ready | Rejected:
        if row.fault is not None:
            return Rejected(row.fault.reason, row.fault.detail)
        outcome = next(results)
        if isinstance(outcome, Rejected):
            return outcome
        sample_id, prompt_id = outcome.lines[-1].sample_id.hex(), outcome.lines[-1].prompt_id.hex()
        if source.split != "heldout":
            if any(line.prompt_id in self._heldout_prompts for line in outcome.lines):
                return Rejected("in_heldout", "a held-out prompt", sample_id, prompt_id)
            most = self._recipe.corpus.max_overlap
            share = self.overlap.share(outcome.grams) if outcome.grams else 0.0
            if share > most:
                detail = f"{share:.0%} of a held-out prompt's 8-grams, at most {most:.0%}"
                return Rejected("overlaps_heldout", detail, sample_id, prompt_id)
        fresh = tuple(line for line in outcome.lines if line.sample_id not in self._seen)
        if not fresh:
            return Rejected("duplicate", "an equal one was read before", sample_id, prompt_id)
        if len(fresh) < len(outcome.lines):
            outcome.notes["answers_left_out_duplicate"] += len(outcome.lines) - len(fresh)
        if outcome.lines[-1].prompt_id in self._prompts:
            if self._recipe.corpus.on_same_prompt == "exclude":
                return Rejected(
                    "same_prompt", "an answer to it was read before", sample_id, prompt_id
                )
            outcome.notes["same_prompt_keep"] += 1
        return Ready(fresh, outcome.notes, outcome.grams)

    def _named(self, rejected: Rejected) -> Rejected:
        """The same; a kind of content that data have made up, after many others, has no name."""
        if not rejected.reason.startswith("content_"):
            return rejected
        if len(self._kinds) < _MOST_KINDS:
            self._kinds.add(rejected.reason)
        known = rejected.reason in self._kinds
        return rejected if known else replace(rejected, reason="unsupported_content")

    def _remember(self, row: Ready, source: SourceRecipe) -> None:
        self._seen.update(line.sample_id for line in row.lines)
        prompt = row.lines[-1].prompt_id
        if not self._recipe.regenerate.enabled:
            # Without their answers, samples of one prompt are one sample.
            self._prompts.add(prompt)
        if source.split == "heldout":
            self._heldout_prompts.add(prompt)
            self.overlap.add_heldout(name_of(source), row.grams)

    def _take(self, row: Ready, tally: SourceTally, corpus: BinaryIO) -> None:
        tally.accepted += 1
        for line in row.lines:
            REAL_FS.write(corpus, line.data)
            tally.accept(line.tokens, line.loss_tokens)
            self.tally.accept(line.split, line.tokens, line.loss_tokens)
            if line.split is Split.TRAIN:
                self.coverage.add(line.trained)
        self.tally.notes.update(row.notes)
        if row.lines[-1].split is Split.TRAIN:
            self.overlap.add_train(row.grams)

    def _mix(
        self,
        candidates: list[Candidate],
        aside: BinaryIO,
        tallies: dict[int, SourceTally],
        corpus: BinaryIO,
        quarantine: Quarantine,
    ) -> None:
        """Take the rows that the mixture wants, in their order, and quarantine the others."""
        sources = self._recipe.corpus.sources
        reasons = left_out(candidates, sources)
        for place, candidate in enumerate(candidates):
            raw, row = pickle.load(aside)
            tally, reason = tallies[candidate.source], reasons.get(place)
            if reason is None:
                self._take(row, tally, corpus)
                continue
            tally.leave_out(reason, _short_name(raw.file, sources[candidate.source]))
            last = row.lines[-1]
            ids = last.sample_id.hex(), last.prompt_id.hex()
            rejected = Rejected(reason, "others of this source have a lower hash", *ids)
            quarantine.add(tally.name, raw, rejected)

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

    def _progress(self, source: str) -> None:
        now = time.monotonic()
        if self._events is not None and now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self._events.emit("progress", self.counts(), source=source)
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            rows = self.tally.read
            _LOG.info(
                "%s: %s rows read, %.0f a second", source, f"{rows:,}", rows / (now - self._start)
            )


def _tally_of(source: SourceRecipe) -> SourceTally:
    return SourceTally(name_of(source), unread=unread_files(source.path))


def _short_name(file: Path, source: SourceRecipe) -> str:
    """A file's name below its source's folder."""
    name = str(file).removeprefix(source.path).lstrip("/")
    return name if len(name) < len(str(file)) and name else file.name


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(
    sources: list[tuple[int, SourceRecipe]], waiting: deque[tuple[int, list[RawRow]]]
) -> Iterator[Chunk]:
    """Rows in chunks; the rows of each chunk, those included that nobody has to look at, wait."""
    for number, source in sources:
        rows: list[RawRow] = []
        size = 0
        for row in read_rows(source.path, source.limit):
            rows.append(row)
            size += len(row.raw)
            if len(rows) >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
                yield _chunk(number, source, rows, waiting)
                rows, size = [], 0
        if rows:
            yield _chunk(number, source, rows, waiting)


def _chunk(
    number: int,
    source: SourceRecipe,
    rows: list[RawRow],
    waiting: deque[tuple[int, list[RawRow]]],
) -> Chunk:
    waiting.append((number, rows))
    return Chunk(
        source=name_of(source),
        heldout=source.split == "heldout",
        first_line=rows[0].line,
        rows=tuple(row.raw for row in rows if row.value is not None),
    )
