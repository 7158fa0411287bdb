"""The work of an extraction: what is left, who does it, and what came of it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.durable.code import source_hash
from paceline.durable.errors import WorkerFailed
from paceline.durable.iowatch import IoWatch
from paceline.durable.journal import Journal
from paceline.durable.session import SESSION, session_record
from paceline.durable.store import Stat, Store
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination, open_depot
from paceline.extract.job import Job, StoredSample, UnitTimes, UnitWork, pick_stored
from paceline.extract.ledger import Survey, is_readable, survey, unit_judge, verified_record
from paceline.extract.moved import STORE, require_same_store
from paceline.extract.progress import Progress
from paceline.extract.results import Result, conclude
from paceline.extract.setting import Setting, Sizes, rows_and_units, sizes_of, tokens_of
from paceline.extract.sharing import join
from paceline.extract.software import IMPORTED, software
from paceline.extract.telling import ProvenTeller, announce, corpus_gaps, tell_recovery
from paceline.extract.watching import (
    apart,
    asked_store,
    looked_after,
    patience_of,
    tell_event,
)
from paceline.extract.worker import open_worker
from paceline.features.plan import Unit
from paceline.flow.supervisor import supervise
from paceline.flow.units import Made, Outcome, Policy, Task, WorkerContext
from paceline.flow.waker import Waker
from paceline.recipe.stage import Report, StageRecord
from paceline.types.rows import Rows
from paceline.watch.events import EventWriter, by_reason

_LOG = logging.getLogger(__name__)

_CHECK_SAMPLES = 4


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
            rows, units, sizes, found, job = apart(self._look)
            with self.watch.call("read records", self.setting.run_dir.corpus):
                gaps = corpus_gaps(self.setting, rows)
        stats, captured = dict(found.done), dict[int, int]()
        made = self._make(rows, units, found, sizes, stats, captured, job)
        with looked_after(self.watch, self.events):
            lost: dict[str, str] = {}
            if not self.to.is_own:
                # What stands there by now, whoever made it; what is listed has to be what is there.
                now = apart(lambda: self._survey(rows, units, deep_bytes=0))
                gone = [units[index].key for index in stats if index not in now.done]
                lost = {key: now.redo.get(key, "it is gone") for key in gone}
                stats = dict(now.done)
            result = Result(rows, units, found, stats, captured, lost, gaps, sizes.estimate, *made)
            told = self.setting, self.to, self.record, self.journal, self.events, result
            return apart(lambda: conclude(*told, leftovers=self.leftovers, watch=self.watch))

    def _look(self) -> tuple[Rows, tuple[Unit, ...], Sizes, Survey, Job]:
        """Find out what is there, record and tell it, and what workers are to know."""
        setting = self.setting
        now_running = software(setting.recipe.target)
        self.events.emit("checking", part=setting.part.told)
        rows, units = rows_and_units(setting, self.watch)
        sizes = sizes_of(setting.layout, rows, units)
        before = self.journal.records
        sessions = [r for r in before if r.get("kind") == SESSION]
        tell = ProvenTeller(self.events, len(units), setting.part.told)
        there = self._survey(rows, units, deep_bytes=self.to.deep_bytes, tell=tell)
        tell(len(there.done), is_last=True)
        require_same_store(setting, self.to, sessions, there)
        found, rechecks = self._prove(rows, units, there, len(sessions))
        with self.watch.call("look back at", setting.run_dir.root):
            tell_recovery(setting, self.to, before, self.events, rows, units, found, sizes.estimate)
        if not self.to.is_own and self._todo(units, found):
            self._join(now_running)
        self.journal.append({**session_record(before, now_running), STORE: self.to.url})
        self.journal.extend(
            verified_record(units[index], stat, self.record.fingerprint)
            for index, stat in found.adopted.items()
        )
        announce(setting, rows, units, found, sizes.estimate)
        for key, reason in found.redo.items():
            _LOG.warning("extract: %s is redone: %s", key, reason)
            self.events.emit("redo", name=key, reason=reason)
        return rows, units, sizes, found, self._job(rows, rechecks, sessions, now_running)

    def _join(self, now_running: dict[str, str]) -> None:
        setting, store = self.setting, self.to.store

        def leave_word() -> None:
            with self.watch.call("leave word in", store.url):
                join(store, now_running, setting.part, accept_code=setting.accept_code)

        patience_of(setting.recipe.extract, self.events)(leave_word)

    def _asked_store(self) -> Store:
        return asked_store(self.to.store, self.setting.recipe.extract, self.watch, self.events)

    def _todo(self, units: Sequence[Unit], found: Survey) -> list[Unit]:
        part = self.setting.part
        return [u for u in units if u.index not in found.done and part.holds(u.index)]

    def _survey(
        self, rows: Rows, units: Sequence[Unit], deep_bytes: int, tell: ProvenTeller | None = None
    ) -> Survey:
        return survey(
            self.journal.records,
            self._asked_store(),
            units,
            rows,
            self.record.fingerprint,
            source=self.setting.source,
            is_shared=not self.to.is_own,
            deep_bytes=deep_bytes,
            on_proven=tell,
        )

    def _prove(
        self, rows: Rows, units: Sequence[Unit], found: Survey, seed: int
    ) -> tuple[Survey, tuple[StoredSample, ...]]:
        """Choose the stored samples that are captured again; their shards are read in full first.

        A worker could only fail over a shard that does not hold; here it is made again.
        """
        done, redo = dict(found.done), dict(found.redo)
        store = self._asked_store()
        while True:
            chosen = pick_stored(
                units,
                set(done),
                rows.positions,
                count=self.setting.recipe.extract.recheck_samples,
                seed=seed,
            )
            keys = {stored.key for stored in chosen}
            torn = {
                unit.index
                for unit in units
                if unit.key in keys and not is_readable(store, unit.key, done[unit.index])
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
        sizes: Sizes,
        stats: dict[int, Stat],
        captured: dict[int, int],
        job: Job,
    ) -> tuple[Progress, Outcome, list[str], int]:
        """Do every unit of this machine that is not done.

        `stats` gets what is verified, `captured` how many samples workers captured for it. Returns
        also what to advise, and how many units others had stored first.
        """
        setting, asked = self.setting, self.setting.recipe.extract
        todo = self._todo(units, found)
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
                judge=unit_judge(
                    WatchedStore(self.to.store, self.watch),
                    units,
                    rows,
                    self.record.fingerprint,
                    source=setting.source,
                    bad=found.bad,
                ),
                bounds=[task.num_bytes for task in tasks],
                largest=max(sizes.bounds),
                workers=setting.workers,
                watch=self.watch,
                events=self.events,
                waker=waker,
            ) as (depot, place),
        ):
            with looked_after(self.watch, self.events), self.watch.call("look for room", place):
                progress = self._progress(mine, rows, found, place, len(tasks))
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
                with looked_after(self.watch, self.events):
                    open_worker(job, WorkerContext(0, self.watch, lambda _: None))
            started = time.monotonic()
            with progress.shown():
                outcome = supervise(
                    open_worker,
                    job,
                    tasks,
                    depot,
                    policy=self._policy(),
                    on_verified=self._on_verified(stats, captured, progress),
                    on_event=self._on_event(progress, by_key),
                    on_tick=progress.tick,
                    watch=self.watch,
                    waker=waker,
                )
            advice = depot.suggest(time.monotonic() - started) if tasks else []
            others_first = depot.meters().others_first
        return progress, outcome, advice, others_first

    def _progress(
        self, mine: Sequence[Unit], rows: Rows, found: Survey, place: Path, tasks: int
    ) -> Progress:
        setting = self.setting
        return Progress(
            self.events,
            mine,
            rows.lengths,
            skipped={u.index for u in mine if u.index in found.done},
            redone=by_reason(found.redo.values()),
            workers=max(1, min(setting.workers, tasks)),
            place=place,
            part=setting.part.told,
        )

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
        self, stats: dict[int, Stat], captured: dict[int, int], progress: Progress
    ) -> Callable[[Task, Made | None, Stat], None]:
        told: set[str] = set()

        def on_verified(task: Task, made: Made | None, stat: Stat) -> None:
            stats[task.index] = stat
            times = None if made is None else made.info
            if isinstance(times, UnitTimes):
                captured[task.index] = times.samples
                for checked in times.rechecked:
                    if checked.sample_id in told:
                        continue  # every worker looks at them
                    told.add(checked.sample_id)
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
        def on_event(kind: str, fields: dict[str, Any]) -> None:
            tell_event(self.events, "extract", kind, fields)
            match kind:
                case "stuck":
                    progress.hangs(fields)
                case "unstuck":
                    progress.returned(fields)
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
