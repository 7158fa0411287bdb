"""The work of an import: shards written from a cache, kept and recorded like captured ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.durable.code import source_hash
from paceline.durable.iowatch import IoWatch
from paceline.durable.journal import Journal
from paceline.durable.session import session_record
from paceline.durable.store import Stat
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination, open_depot
from paceline.extract.foreign_files import Cache
from paceline.extract.foreign_layers import Meaning, Selection
from paceline.extract.foreign_maker import ForeignJob, ForeignUnit, open_foreign_maker
from paceline.extract.ledger import unit_judge, verified_record
from paceline.extract.moved import STORE
from paceline.extract.setting import Setting, tokens_of
from paceline.extract.software import IMPORTED, software
from paceline.extract.stage import end_noted
from paceline.extract.watching import tell_event
from paceline.features.plan import Unit
from paceline.flow.supervisor import supervise
from paceline.flow.units import Made, Policy, Task
from paceline.flow.waker import Waker
from paceline.types.rows import Rows
from paceline.watch.events import Counts, EventWriter
from paceline.watch.progress import TokenProgress

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is to be written."""

    rows: Rows
    units: Sequence[Unit]
    """All of the extraction."""

    files: Mapping[int, Sequence[int]]
    """By unit to import, the file of each of its samples, in the order of the shard's rows."""

    done: Mapping[int, Stat]
    """Units that the store proves."""

    adopted: Mapping[int, Stat]
    """Of those, the ones that no record knows."""

    bad: AbstractSet[str]
    """Keys under which there is something that is not the unit."""


@dataclass
class Imported:
    """What the work came to."""

    stats: dict[int, Stat] = field(default_factory=dict)
    """Imported units by index."""

    failed: dict[int, str] = field(default_factory=dict)
    """Files that could not be used in the end, and why."""

    set_aside: dict[str, str] = field(default_factory=dict)
    """Units that failed for another reason, by key."""

    counts: Counts | None = None
    """Of the whole extraction, at the end; None where there was nothing to do."""


def import_units(
    setting: Setting,
    to: Destination,
    fingerprint: str,
    journal: Journal,
    events: EventWriter,
    cache: Cache,
    meaning: Meaning,
    pick: Selection,
    plan: Plan,
    watch: IoWatch,
) -> Imported:
    """Have the units written, verified and recorded, by worker processes.

    A unit that fails, as over a file that changed meanwhile, is left to the extraction. Calls that
    do not return are known to `watch`. Raises StorageRefused, StoreFailed, WorkerFailed and
    Interrupted as `supervise` does; what is verified by then is recorded.
    """
    recipe = setting.recipe
    running = software(recipe.target) | {IMPORTED: f"imported from {cache.tool}"}
    journal.append({**session_record(journal.records, running), STORE: to.url})
    job = ForeignJob(
        corpus=setting.source,
        fingerprint=fingerprint,
        layout=setting.layout,
        kind=cache.kind,
        meaning=meaning,
        pick=pick,
        target=Path(recipe.target.path),
        compute=recipe.target.dtype,
    )
    policy = Policy(
        workers=setting.workers,
        threads=recipe.target.threads,
        isolate=recipe.extract.isolate,
        unit_retries=recipe.extract.unit_retries,
        code=source_hash(),
    )
    tasks = [_task(setting, cache, plan, index) for index in plan.files]
    units = {unit.key: unit for unit in plan.units}
    result = Imported()
    with end_noted(journal, watch, events):
        journal.extend(
            verified_record(plan.units[index], stat, fingerprint)
            for index, stat in plan.adopted.items()
        )
        with (
            closing(Waker()) as waker,
            open_depot(
                to,
                recipe.extract,
                setting.run_dir,
                journal,
                fingerprint,
                samples=lambda key: units[key].stop - units[key].start,
                judge=unit_judge(
                    WatchedStore(to.store, watch),
                    plan.units,
                    plan.rows,
                    fingerprint,
                    source=setting.source,
                    bad=plan.bad,
                ),
                bounds=[task.num_bytes for task in tasks],
                largest=max(task.num_bytes for task in tasks),
                workers=setting.workers,
                watch=watch,
                events=events,
                waker=waker,
            ) as (depot, _),
        ):
            progress = _Progress(events, plan, tasks)
            with progress.terminal:
                outcome = supervise(
                    open_foreign_maker,
                    job,
                    tasks,
                    depot,
                    policy=policy,
                    on_verified=progress.on_verified(result.stats),
                    on_event=progress.on_event,
                    watch=watch,
                    waker=waker,
                )
    result.counts = progress.counts
    for key, reason in outcome.quarantined.items():
        blamed = _blamed(cache, plan.files[units[key].index], reason)
        if blamed is None:
            result.set_aside[key] = reason
        else:
            result.failed[blamed] = reason.partition(f"{cache.files[blamed]}: ")[2]
    return result


def _task(setting: Setting, cache: Cache, plan: Plan, index: int) -> Task:
    unit = plan.units[index]
    tokens, samples = tokens_of(plan.rows, unit), unit.stop - unit.start
    return Task(
        index=index,
        key=unit.key,
        num_bytes=setting.layout.bytes_bound(tokens=tokens, samples=samples),
        tokens=tokens,
        payload=ForeignUnit(
            positions=tuple(plan.rows.positions[list(unit.samples)].tolist()),
            files=tuple(cache.files[number] for number in plan.files[index]),
        ),
    )


def _blamed(cache: Cache, files: Sequence[int], reason: str) -> int | None:
    """The file that a unit failed over; None where it was something else."""
    return next((n for n in files if f"{cache.files[n]}: " in reason), None)


class _Progress:
    """Tells of imported units, as events and in `terminal`."""

    def __init__(self, events: EventWriter, plan: Plan, tasks: Sequence[Task]) -> None:
        self._events = events
        self._samples = {unit.key: unit.stop - unit.start for unit in plan.units}
        before = [plan.units[index] for index in plan.done]
        samples = sum(unit.stop - unit.start for unit in before)
        tokens = sum(tokens_of(plan.rows, unit) for unit in before)
        # Those of the whole extraction: `status` shows what is there of it.
        self.counts = Counts(
            unit="samples",
            total=len(plan.rows),
            done=samples,
            skipped=samples,
            tokens=tokens,
            tokens_total=plan.rows.tokens,
        )
        total = tokens + sum(task.tokens for task in tasks)
        self.terminal = TokenProgress("import", total, done=tokens)
        events.emit("start", self.counts, units=len(plan.units), units_done=len(before))

    def on_verified(self, stats: dict[int, Stat]) -> Callable[[Task, Made | None, Stat], None]:
        """What `supervise` calls; `stats` gets what is verified."""

        def on_verified(task: Task, _made: Made | None, stat: Stat) -> None:
            stats[task.index] = stat
            counts = self.counts
            self.counts = replace(
                counts,
                done=counts.done + self._samples[task.key],
                tokens=counts.tokens + task.tokens,
            )
            self._events.emit("progress", self.counts)
            self.terminal.update(self.counts.tokens)

        return on_verified

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """What `supervise` calls, from any thread."""
        tell_event(self._events, "import", kind, fields)
        if kind == "quarantined":
            _LOG.error("import: %s is left out: %s", fields["key"], fields["reason"])
