"""The work of an extraction: what is left, who does it, and what came of it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.durable.code import source_hash
from paceline.durable.errors import WorkerFailed
from paceline.durable.iowatch import IoWatch
from paceline.durable.journal import Journal
from paceline.durable.session import SESSION, oom_kills, session_record
from paceline.durable.staging import boot_id
from paceline.durable.store import Stat
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination, open_depot
from paceline.extract.job import Job, StoredSample, UnitTimes, UnitWork, pick_stored
from paceline.extract.ledger import Survey, is_readable, survey, verified_record
from paceline.extract.progress import Progress
from paceline.extract.recovery import Standing, recovery_report
from paceline.extract.results import Result, conclude
from paceline.extract.row_index import FILE_NAME as INDEX_NAME
from paceline.extract.row_index import open_rows
from paceline.extract.rows import Rows
from paceline.extract.setting import Setting, tokens_of
from paceline.extract.sharing import join
from paceline.extract.software import IMPORTED, software
from paceline.extract.telling import announce
from paceline.extract.watching import event_fields, looked_after
from paceline.extract.worker import open_worker
from paceline.features.plan import Unit
from paceline.features.sizes import store_bytes
from paceline.flow.supervisor import supervise
from paceline.flow.units import Made, Outcome, Policy, Task, WorkerContext
from paceline.flow.waker import Waker
from paceline.recipe.stage import Report, StageRecord
from paceline.watch.events import EventWriter, by_reason

_LOG = logging.getLogger(__name__)

_CHECK_SAMPLES = 4


@dataclass(frozen=True)
class _Sizes:
    """Arithmetic over the whole store."""

    estimate: int
    bounds: tuple[int, ...]
    """The most bytes of each unit."""


@dataclass(frozen=True)
class Work:
    """One process's part in an extraction."""

    setting: Setting
    to: Destination
    record: StageRecord
    journal: Journal
    events: EventWriter
    leftovers: Sequence[str]
    """Unfinished files of killed runs, removed."""
    watch: IoWatch
    """Knows the calls of this process that are going on."""

    def do(self) -> Report:
        """Make what is left; see `stage.run`."""
        with looked_after(self.watch, self.events):
            rows, units, sizes, found, job = self._look()
        stats = dict(found.done)
        progress, outcome, advice = self._make(rows, units, found, sizes, stats, job)
        with looked_after(self.watch, self.events):
            if self.setting.part.count > 1:
                # Those of the other machines, as far as they are by now.
                stats = dict(self._survey(rows, units).done)
            result = Result(rows, units, found, stats, progress, outcome, advice, sizes.estimate)
            return conclude(
                self.setting,
                self.to,
                self.record,
                self.journal,
                self.events,
                result,
                leftovers=self.leftovers,
            )

    def _look(self) -> tuple[Rows, tuple[Unit, ...], _Sizes, Survey, Job]:
        """Find out what is there, record and tell it, and what workers are to know."""
        setting, asked = self.setting, self.setting.recipe.extract
        now_running = software(setting.recipe.target)
        if setting.part.count > 1:
            join(self.to.store, now_running, accept_code=setting.accept_code)
        self.events.emit("checking")
        rows = open_rows(
            setting.source,
            setting.corpus_digest,
            vocab_size=setting.spec.vocab_size,
            max_position=setting.spec.max_position,
            index=setting.run_dir.features / INDEX_NAME,
        )
        units = setting.layout.units(rows, asked.batch_tokens)
        sizes = self._sizes(rows, units)
        before = self.journal.records
        sessions = [r for r in before if r.get("kind") == SESSION]
        found, rechecks = self._prove(rows, units, self._survey(rows, units), len(sessions))
        self._tell_recovery(rows, units, found, sizes)
        self.journal.append(session_record(before, now_running))
        for index in found.adopted:
            self.journal.append(
                verified_record(units[index], found.adopted[index], self.record.fingerprint)
            )
        announce(setting, rows, units, found, sizes.estimate)
        for key, reason in found.redo.items():
            _LOG.warning("extract: %s is redone: %s", key, reason)
            self.events.emit("redo", name=key, reason=reason)
        return rows, units, sizes, found, self._job(rows, rechecks, sessions, now_running)

    def _survey(self, rows: Rows, units: Sequence[Unit]) -> Survey:
        return survey(
            self.journal.records,
            WatchedStore(self.to.store, self.watch),
            units,
            rows,
            self.record.fingerprint,
            source=self.setting.source,
            deep_bytes=self.to.deep_bytes,
        )

    def _sizes(self, rows: Rows, units: Sequence[Unit]) -> _Sizes:
        layout = self.setting.layout
        estimate = store_bytes(
            tokens=rows.tokens,
            samples=len(rows),
            shards=len(units),
            bytes_per_token=layout.bytes_per_token,
            codec=layout.codec,
            dtype=layout.dtype,
        )
        return _Sizes(
            estimate,
            tuple(
                layout.bytes_bound(tokens=tokens_of(rows, unit), samples=unit.stop - unit.start)
                for unit in units
            ),
        )

    def _tell_recovery(
        self, rows: Rows, units: Sequence[Unit], found: Survey, sizes: _Sizes
    ) -> None:
        """How the last run ended and what is left of it, before anything else is said."""
        done = [units[index] for index in found.done]
        paths = {"the run": self.setting.run_dir.root}
        if self.to.folder is not None:
            paths = {"the features": self.to.folder, **paths}
        standing = Standing(
            units=len(done),
            units_total=len(units),
            samples=sum(u.stop - u.start for u in done),
            bytes=sum(stat.size for stat in found.done.values()),
            tokens=sum(tokens_of(rows, u) for u in done),
            tokens_total=rows.tokens,
            staged_units=len(found.staged),
            staged_bytes=sum(stat.size for stat in found.staged.values()),
        )
        left = max(0, sizes.estimate - standing.bytes) if self.to.folder is not None else 0
        recovery = recovery_report(
            self.journal.records,
            self.setting.run_dir.events,
            standing,
            boot_id=boot_id(),
            oom_kills=oom_kills(),
            paths=paths,
            bytes_left=left,
        )
        for line in recovery.lines:
            _LOG.log(logging.WARNING if recovery.was_unclean else logging.INFO, "extract: %s", line)
        if recovery.lines:
            self.events.emit("recovery", ending=recovery.ending, lines=list(recovery.lines))

    def _prove(
        self, rows: Rows, units: Sequence[Unit], found: Survey, seed: int
    ) -> tuple[Survey, tuple[StoredSample, ...]]:
        """Choose the stored samples that are captured again; their shards are read in full first.

        A worker could only fail over a shard that does not hold; here it is made again.
        """
        done, redo = dict(found.done), dict(found.redo)
        store = WatchedStore(self.to.store, self.watch)
        while True:
            chosen = pick_stored(
                units,
                set(done),
                rows.positions,
                count=self.setting.recipe.extract.recheck_samples,
                seed=seed,
            )
            torn = {
                unit.index
                for unit in units
                if unit.index in done
                and unit.key in {stored.key for stored in chosen}
                and not is_readable(store, unit.key, done[unit.index])
            }
            if not torn:
                adopted = {index: stat for index, stat in found.adopted.items() if index in done}
                return replace(found, done=done, redo=redo, adopted=adopted), chosen
            for index in torn:
                size = done.pop(index).size
                redo[units[index].key] = f"torn or damaged (all {size} bytes, a checksum is wrong)"

    def _job(
        self,
        rows: Rows,
        rechecks: tuple[StoredSample, ...],
        sessions: Sequence[Mapping[str, Any]],
        now_running: dict[str, str],
    ) -> Job:
        """What every worker is told; a resume captures stored samples again."""
        setting, asked = self.setting, self.setting.recipe.extract
        target = setting.recipe.target
        if target.devices:
            # Each worker sees one GPU, as its first.
            target = replace(target, device="cuda:0", devices=())
        for name, value in now_running.items():
            was = sessions[-1]["software"].get(name, value) if sessions else value
            if was != value:
                _LOG.warning("extract: %s was %s in the last session, now %s", name, was, value)
        return Job(
            target=target,
            identity=setting.layout.target_identity,
            corpus=setting.source,
            layer_ids=setting.layout.layer_ids,
            last=setting.layout.last,
            dtype=setting.layout.dtype,
            codec=setting.layout.codec,
            fingerprint=self.record.fingerprint,
            check_positions=tuple(rows.positions[:_CHECK_SAMPLES].tolist()),
            chunk_tokens=asked.chunk_tokens,
            scratch=setting.run_dir.root,
            compile_cache=setting.run_dir.root / "compile" if target.device != "cpu" else None,
            rechecks=rechecks,
            store=self.to.store.url,
            store_options=asked.store_options,
            software=now_running,
            made_with=dict(sessions[-1]["software"]) if sessions else {},
        )

    def _make(
        self,
        rows: Rows,
        units: Sequence[Unit],
        found: Survey,
        sizes: _Sizes,
        stats: dict[int, Stat],
        job: Job,
    ) -> tuple[Progress, Outcome, list[str]]:
        """Do every unit of this machine that is not done; `stats` gets what is verified."""
        setting, asked = self.setting, self.setting.recipe.extract
        todo = [u for u in units if u.index not in found.done and setting.part.holds(u.index)]
        mine = [u for u in units if setting.part.holds(u.index)]
        tasks = [
            Task(
                index=unit.index,
                key=unit.key,
                num_bytes=sizes.bounds[unit.index],
                tokens=tokens_of(rows, unit),
                payload=UnitWork(
                    positions=tuple(rows.positions[list(unit.samples)].tolist()),
                    batches=tuple(len(batch) for batch in unit.batches),
                ),
            )
            for unit in todo
        ]
        by_key = {unit.key: unit for unit in units}
        with (
            closing(Waker()) as waker,
            open_depot(
                self.to,
                asked,
                setting.run_dir,
                self.journal,
                self.record.fingerprint,
                samples=lambda key: by_key[key].stop - by_key[key].start,
                bounds=[task.num_bytes for task in tasks],
                workers=setting.workers,
                watch=self.watch,
                waker=waker,
            ) as (depot, place),
        ):
            progress = Progress(
                self.events,
                mine,
                rows.lengths,
                skipped={u.index for u in mine if u.index in found.done},
                redone=by_reason(found.redo.values()),
                workers=max(1, min(setting.workers, len(tasks))),
                place=place,
                part=str(setting.part) if setting.part.count > 1 else "",
            )
            self.events.emit(
                "start",
                progress.counts(),
                **progress.more(),
                fingerprint=self.record.fingerprint,
                layer_ids=setting.layout.layer_ids,
                bytes_per_token=setting.layout.bytes_per_token,
                bytes_estimated=sizes.estimate,
                codec=setting.layout.codec,
                store=self.to.store.url,
            )
            if not tasks and IMPORTED in job.made_with and job.rechecks:
                # No worker begins, and what others made has to be proven by somebody.
                open_worker(job, WorkerContext(0, self.watch, lambda _: None))
            started = time.monotonic()
            with progress:
                outcome = supervise(
                    open_worker,
                    job,
                    tasks,
                    depot,
                    policy=self._policy(),
                    on_verified=self._on_verified(stats, progress),
                    on_event=self._on_event(progress, by_key),
                    on_tick=progress.tick,
                    watch=self.watch,
                    waker=waker,
                )
            advice = depot.suggest(time.monotonic() - started) if tasks else []
        return progress, outcome, advice

    def _policy(self) -> Policy:
        target, asked = self.setting.recipe.target, self.setting.recipe.extract
        return Policy(
            workers=target.workers,
            threads=target.threads,
            devices=target.devices,
            isolate=asked.isolate,
            unit_retries=asked.unit_retries,
            code=source_hash(),
        )

    def _on_verified(
        self, stats: dict[int, Stat], progress: Progress
    ) -> Callable[[Task, Made | None, Stat], None]:
        def on_verified(task: Task, made: Made | None, stat: Stat) -> None:
            stats[task.index] = stat
            times = None if made is None else made.info
            if isinstance(times, UnitTimes):
                for checked in times.rechecked:
                    how = "bit for bit" if checked.exact else "within the rounding of its type"
                    _LOG.info(
                        "extract: stored sample %s, captured again, is the same %s",
                        *(checked.sample_id, how),
                    )
            progress.add(task.index, times)

        return on_verified

    def _on_event(
        self, progress: Progress, units: Mapping[str, Unit]
    ) -> Callable[[str, dict[str, Any]], None]:
        def on_event(kind: Any, fields: dict[str, Any]) -> None:
            self.events.emit(kind, **event_fields(fields))
            match kind:
                case "stuck":
                    progress.hangs(fields)
                case "unstuck":
                    progress.returned(fields)
                case "waiting":
                    _LOG.warning("extract: waiting: %s", fields["reason"])
                case "going_on":
                    _LOG.info("extract: going on after %.0f s", fields["seconds"])
                case "failed_unit":
                    _LOG.warning("extract: %s failed: %s", fields["key"], fields["reason"])
                    self._note("failed", fields)
                case "quarantined":
                    self._note("quarantined", fields)
                    progress.set_aside(units[fields["key"]].index, "made no shard")
                    allowed = self.setting.recipe.extract.allow_quarantined
                    if progress.is_hopeless and progress.failed_in_a_row > allowed:
                        raise WorkerFailed(
                            f"the last {progress.failed_in_a_row} shards all failed, so the "
                            f"others are not tried. The last: {fields['reason']}"
                        )

        return on_event

    def _note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """For the next start and for `verify`; a full disk keeps it out, and the events have it."""
        record = {"kind": kind, "key": fields["key"], "fingerprint": self.record.fingerprint}
        with suppress(OSError):
            self.journal.append({**record, "reason": fields["reason"]})
