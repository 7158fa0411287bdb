"""`paceline import`: takes over hidden states that other tools computed.

The plan is that of `paceline extract`: the same fingerprint, keys, store and journal. A shard all
of whose samples are in the cache is written and recorded as verified; the rest is left to the
extraction, which also publishes the manifest.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.durable.errors import DataError
from paceline.durable.iowatch import IoWatch
from paceline.durable.journal import Journal
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination
from paceline.extract.foreign_check import ForeignCheck, ToCheck
from paceline.extract.foreign_files import Cache, Tool, Unreadable, find_cache
from paceline.extract.foreign_layers import Meaning, Selection, Stated, resolve, select
from paceline.extract.foreign_match import TokenIndex, files_of, first_shape, scan
from paceline.extract.foreign_tally import Tally, tally_of, unreadable_words
from paceline.extract.foreign_work import Imported, Plan, import_units
from paceline.extract.layout import JOURNAL
from paceline.extract.ledger import Survey, survey
from paceline.extract.setting import Setting, rows_and_units, tokens_of
from paceline.extract.stage import is_complete, open_journal, open_setting
from paceline.extract.watching import looked_after
from paceline.features.plan import Unit
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, TargetRecipe
from paceline.recipe.stage import Report, StageRecord
from paceline.target.load import load_target
from paceline.types.rows import Rows
from paceline.watch.events import EventWriter
from paceline.watch.words import command_line, counted, short_bytes

_LOG = logging.getLogger(__name__)

_ROLE = "import"


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """What is to be imported."""

    source: Path
    tool: Tool
    stated: Stated = field(default_factory=Stated)
    check: int = 2
    """Samples that are captured with the run's target and compared before anything is recorded."""


def import_features(recipe: Recipe, run_dir: RunDir, request: ImportRequest) -> Report:
    """Write and record every shard whose samples are all in the cache; the source is only read.

    A shard that is done is left as it is, so a killed import goes on where it was. `undone` of the
    report has what was asked for and could not be had: files that cannot be read, or nothing at
    all to import.

    Raises UserError for a cache without the run's taps, or of which more has to be stated;
    TargetError where its states are not what they are said to be, naming what they are; and what
    `stage.run` raises for the recipe, the corpus and the store.
    """
    watch = IoWatch()
    setting, record, to = open_setting(recipe, run_dir, watch=watch)
    if is_complete(setting, record, to, watch):
        return Report(
            stage=_ROLE,
            skipped=True,
            lines=("import: the features are complete with this recipe; nothing to do.",),
        )
    cache = find_cache(request.source, request.tool)
    shape = first_shape(cache, setting.layout.hidden_size)
    meaning = resolve(cache.kind, shape, request.stated, setting.spec.num_layers)
    pick = select(meaning, setting.layout.layer_ids, last=setting.layout.last)
    _LOG.info(
        "import: %s of %s in %s, read as `%s`",
        *(counted(len(cache.files), "file"), cache.tool, cache.root, meaning.in_words()),
    )
    with (
        EventWriter(run_dir.events, "extract") as events,
        open_journal(run_dir.root, run_dir.features / JOURNAL, watch) as journal,
    ):
        work = _Import(setting, record, to, journal, events, cache, meaning, pick, watch)
        return work.do(request.check)


@dataclass(frozen=True)
class _Import:
    setting: Setting
    record: StageRecord
    to: Destination
    journal: Journal
    events: EventWriter
    cache: Cache
    meaning: Meaning
    pick: Selection
    watch: IoWatch

    def do(self, check: int) -> Report:
        setting, cache = self.setting, self.cache
        with looked_after(self.watch, self.events):
            rows, units = rows_and_units(setting, self.watch)
            index = TokenIndex(rows, setting.source)
            found = scan(
                cache,
                index,
                self.meaning.shape,
                setting.layout.hidden_size,
                lambda text: _LOG.info("import: %s", text),
            )
            before = survey(
                self.journal.records,
                WatchedStore(self.to.store, self.watch),
                units,
                rows,
                self.record.fingerprint,
                source=setting.source,
                is_shared=not self.to.is_own,
                deep_bytes=self.to.deep_bytes,
            )
        todo: dict[int, list[int]] = {}
        for unit in units:
            files = files_of(found, index, unit.samples)
            if files is not None and unit.index not in before.done:
                todo[unit.index] = files
        lines: list[str] = []
        result = Imported()
        if todo:
            lines = self._check(rows, units, todo, check)
            self.record.begin()
            plan = Plan(rows, units, todo, before.done, before.adopted, before.bad)
            result = import_units(
                self.setting,
                self.to,
                self.record.fingerprint,
                self.journal,
                self.events,
                self.cache,
                self.meaning,
                self.pick,
                plan,
                self.watch,
            )
        tally = tally_of(
            cache,
            found,
            index,
            units,
            imported=result.stats,
            before=before.done,
            failed=result.failed,
        )
        return self._report(rows, units, before, result, tally, lines)

    def _check(
        self, rows: Rows, units: Sequence[Unit], todo: Mapping[int, Sequence[int]], count: int
    ) -> list[str]:
        """Compare samples with the target, before anything is recorded; a line on each."""
        if not count:
            unseen = (
                "nothing was compared with the target (--check 0): layers counted otherwise, or "
                "another target's, would not have been seen."
            )
            return [unseen]
        rng = random.Random(len(self.journal.records))
        of_units = rng.sample(sorted(todo), min(count, len(todo)))
        chosen: list[ToCheck] = []
        for at in range(count):
            # From as many shards as there are.
            unit = units[of_units[at % len(of_units)]]
            row = rng.randrange(len(unit.samples))
            sample = ToCheck(int(rows.positions[unit.samples[row]]), todo[unit.index][row])
            if sample not in chosen:
                chosen.append(sample)
        _LOG.info("import: %s compared with the target", counted(len(chosen), "sample"))
        target = load_target(_on_one_device(self.setting.recipe.target))
        try:
            checked = ForeignCheck(target, self.setting, self.cache, self.meaning, self.pick).run(
                chosen
            )
        except Unreadable as error:
            raise DataError(f"{self.cache.root}: changed while it was read: {error}.") from error
        return [
            f"sample {one.sample_id}, captured by the target, is the same "
            + (
                "bit for bit."
                if one.exact
                else f"within rounding (relative L2 {one.relative_l2:.2g})."
            )
            for one in checked
        ]

    def _report(
        self,
        rows: Rows,
        units: Sequence[Unit],
        before: Survey,
        result: Imported,
        tally: Tally,
        checked: Sequence[str],
    ) -> Report:
        imported = [units[index] for index in result.stats]
        samples = sum(unit.stop - unit.start for unit in imported)
        size = sum(stat.size for stat in result.stats.values())
        left = len(units) - len(before.done) - len(imported)
        numbers = {
            "units": len(units),
            "units_imported": len(imported),
            "units_before": len(before.done),
            "units_left": left,
            "samples_imported": samples,
            "tokens_imported": sum(tokens_of(rows, unit) for unit in imported),
            "bytes_imported": size,
            **tally.numbers(),
        }
        extract = command_line("paceline", "extract", "--run", self.setting.run_dir.root)
        then = (
            f"{counted(left, 'shard')} of {len(units):,} {'is' if left == 1 else 'are'} left: "
            f"`{extract}` makes {'it' if left == 1 else 'them'} and publishes all."
            if left
            else f"All {counted(len(units), 'shard')} are there: `{extract}` looks at them and "
            "publishes the manifest."
        )
        told = (
            f"imported {counted(len(imported), 'shard')} with {counted(samples, 'sample')}, "
            f"{short_bytes(size)}; {len(before.done):,} were done before."
        )
        lines = (
            *checked,
            told,
            *tally.lines(),
            then,
        )
        undone = [
            *unreadable_words(tally),
            *(f"{key} was left out: {reason}" for key, reason in result.set_aside.items()),
        ]
        if not imported and not before.done:
            undone.append(_nothing(tally))
        if result.counts is not None:
            # The extraction has begun by this, and is not at its end.
            told = f"An import left it here. {then}"
            self.events.emit(
                "interrupted", result.counts, error=told, report=numbers, files=tally.names()
            )
        return Report(stage=_ROLE, numbers=numbers, lines=lines, undone=tuple(undone))


def _nothing(tally: Tally) -> str:
    if not tally.left:
        return (
            "nothing was imported: no file has the token ids of a sample of this corpus. The "
            "cache was made of other conversations, or with another template, tokenizer or "
            "maximal length."
        )
    return (
        "nothing was imported: no shard has all of its samples in the cache. A smaller "
        "extract.shard_bytes, in a new run directory (`--run DIR`), makes shards of fewer samples."
    )


def _on_one_device(target: TargetRecipe) -> TargetRecipe:
    """The target on the first of its GPUs."""
    if not target.devices:
        return target
    return replace(target, device=f"cuda:{target.devices[0]}", devices=())
