"""The end of an extraction: what is there, what is not, and the manifest where all is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.durable.checksum import crc64_file
from paceline.durable.errors import IntegrityError
from paceline.durable.fs import REAL_FS
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.store import Stat, Store
from paceline.extract.destination import Destination
from paceline.extract.ledger import Survey, recorded
from paceline.extract.progress import Progress
from paceline.extract.setting import Setting, tokens_of
from paceline.extract.telling import findings, report_lines
from paceline.extract.watching import asked_store
from paceline.features import manifest as manifests
from paceline.features.plan import Unit
from paceline.flow.units import Outcome
from paceline.recipe.stage import Report, StageRecord
from paceline.types.rows import Rows
from paceline.watch.events import EventWriter
from paceline.watch.words import counted

_NAMED = 5
"""Shards set aside that an event names."""


@dataclass(frozen=True)
class Result:
    """What the work has come to."""

    rows: Rows
    units: tuple[Unit, ...]
    found: Survey
    """What was there before."""
    stats: Mapping[int, Stat]
    """Verified units by index, those of other machines included."""
    captured: Mapping[int, int]
    """Samples that this run's workers counted as they captured them, by unit."""
    lost: Mapping[str, str]
    """Keys of units that were verified and are not any more, with the reason."""
    gaps: Sequence[str]
    """Where the corpus is not what its stage recorded, a sentence each."""
    estimate: int
    """Bytes, before anything was made."""
    progress: Progress
    outcome: Outcome
    advice: Sequence[str]
    others_first: int
    """Units that were made here, and that another process had stored before: theirs are kept."""

    @property
    def missing(self) -> list[Unit]:
        """Units that are not verified, or not of as many samples as they are to hold."""
        gone = {unit.index for unit in self.miscounted}
        return [u for u in self.units if u.index not in self.stats or u.index in gone]

    @property
    def miscounted(self) -> list[Unit]:
        """Stored units for which another number of samples was captured than they are to hold."""
        told = self.captured
        return [
            unit
            for unit in self.units
            if unit.index in self.stats
            and told.get(unit.index, unit.stop - unit.start) != unit.stop - unit.start
        ]


def conclude(
    setting: Setting,
    to: Destination,
    record: StageRecord,
    journal: Journal,
    events: EventWriter,
    result: Result,
    *,
    leftovers: Sequence[str],
    watch: IoWatch,
) -> Report:
    """Publish the manifest where all is there, and say how it stands.

    Calls that do not return are known to `watch`.
    """
    store = asked_store(to.store, setting.recipe.extract, watch, events)
    missing, progress = result.missing, result.progress
    elsewhere = _set_aside_elsewhere(store, record.fingerprint) if setting.part.count > 1 else {}
    aside = {u.key: elsewhere[u.key] for u in missing if u.key in elsewhere}
    aside |= _set_aside(journal, record.fingerprint, result)
    is_whole = len(missing) == len(aside) <= setting.recipe.extract.allow_quarantined
    numbers = _numbers(setting, to, result, aside)
    samples = {unit.key: unit.stop - unit.start for unit in missing}
    again = "`paceline extract` tries it again."
    if is_whole:
        again = f"`extract.allow_quarantined` lets it be missing; with 0 there, {again}"
    undone = tuple(
        f"{key} ({counted(samples[key], 'sample')}) was set aside: {reason.rstrip('.')}. {again}"
        for key, reason in aside.items()
    )
    undone += tuple(
        f"{key} was verified, and is not in {to.store.url} any more: {reason.rstrip('.')}. "
        "`paceline extract` makes it again."
        for key, reason in result.lost.items()
    )
    undone += tuple(_miscounts(result))
    undone += tuple(result.gaps)
    others = len(missing) - len(aside) - len(result.lost) - len(result.miscounted)
    lines = [
        f"{progress.line()}.",
        *report_lines(numbers, progress.uploads()),
        *_others_first(result.others_first),
        *result.advice,
        *findings(result.found, leftovers, again=result.outcome.redone),
    ]
    if is_whole:
        manifest = setting.layout.manifest(
            result.rows,
            result.units,
            result.stats,
            fingerprint=record.fingerprint,
            store=to.url,
            quarantined=aside,
        )
        numbers["manifest"] = manifest.digest
        fs = WatchedFs(REAL_FS, watch)
        path = manifests.publish(setting.run_dir.features, manifest, fs=fs)
        if to.url and store.head(manifests.FILE_NAME) != Stat(
            path.stat().st_size, crc64_file(path)
        ):
            store.put(manifests.FILE_NAME, path)
        with watch.call("record the end in", setting.run_dir.features):
            record.finish([path], numbers)
    elif others:
        lines.append(
            f"part {setting.part} is done; {counted(others, 'shard')} of the other parts "
            f"{'is' if others == 1 else 'are'} not in {to.store.url} yet. Whoever completes the "
            "last one publishes the manifest; this command again, here, takes it over. A machine "
            "that names another place has another corpus, target or recipe."
        )
    if is_whole:
        events.emit("finished", progress.counts(), **progress.more(), report=numbers)
    else:
        # Whoever says nothing at the end is taken for dead.
        told = {"error": _in_short(undone)} if undone else {"told": lines[-1]}
        kind = "failed" if undone else "part_done"
        events.emit(kind, progress.counts(), **progress.more(), **told)
    return Report(stage="extract", numbers=numbers, lines=tuple(lines), undone=undone)


def _others_first(count: int) -> list[str]:
    if not count:
        return []
    told = (
        f"{counted(count, 'shard')} made here, and left out: another process of the same "
        "extraction had stored the same before. `--shard` divides the work among machines."
    )
    return [told]


def _miscounts(result: Result) -> Iterator[str]:
    for unit in result.miscounted:
        yield (
            f"{unit.key} is to hold {counted(unit.stop - unit.start, 'sample')}, and its worker "
            f"counts {result.captured[unit.index]:,} captured. `paceline "
            "extract` looks at what is stored, and makes it again where that is not all of them."
        )


def _in_short(undone: Sequence[str]) -> str:
    more = len(undone) - _NAMED
    return "\n".join([*undone[:_NAMED], *([f"and {more:,} more"] if more > 0 else [])])


def _set_aside(journal: Journal, fingerprint: str, result: Result) -> dict[str, str]:
    """Units without a shard that were given up, here or by an earlier run: key to reason."""
    before = recorded(journal.records, fingerprint).quarantined
    reasons = {**before, **result.outcome.quarantined}
    return {unit.key: reasons[unit.key] for unit in result.missing if unit.key in reasons}


def _set_aside_elsewhere(store: Store, fingerprint: str) -> dict[str, str]:
    """Units that the machine which has published gave up: no other machine's journal has them."""
    for found in store.list(manifests.FILE_NAME):
        # One that is damaged tells nothing, and is published anew.
        with suppress(IntegrityError):
            data = store.get_range(found.key, 0, found.size)
            published = manifests.decode(data, f"{store.url}/{found.key}")
            if published.fingerprint == fingerprint:
                return {unit.key: unit.reason for unit in published.quarantined}
    return {}


def _numbers(
    setting: Setting, to: Destination, result: Result, aside: Mapping[str, str]
) -> dict[str, Any]:
    rows, missing = result.rows, result.missing
    lost_samples = sum(unit.stop - unit.start for unit in missing)
    lost_loss = sum(int(rows.loss_tokens[u.start : u.stop].sum()) for u in missing)
    return {
        "samples": len(rows) - lost_samples,
        "tokens": rows.tokens - sum(tokens_of(rows, unit) for unit in missing),
        "loss_tokens": int(rows.loss_tokens.sum()) - lost_loss,
        "samples_read": rows.read,
        "samples_captured": sum(result.captured.values()),
        "gaps": list(result.gaps),
        "left_out_heldout": rows.heldout,
        "left_out_without_loss": rows.without_loss,
        "left_out_for_training": rows.other,
        "quarantined_samples": sum(u.stop - u.start for u in missing if u.key in aside),
        "samples_missing": lost_samples,
        "units": len(result.units),
        "units_missing": len(missing),
        "units_of_earlier_runs": len(result.found.done),
        "units_redone": len(result.found.redo) + result.outcome.redone,
        "units_others_first": result.others_first,
        "units_quarantined": len(aside),
        "deaths": result.outcome.deaths,
        "bytes": sum(stat.size for stat in result.stats.values()),
        "bytes_estimated": result.estimate,
        "bytes_per_token": setting.layout.bytes_per_token,
        "tokens_per_s": result.progress.tokens_per_s,
        "layer_ids": list(setting.layout.layer_ids),
        "last": setting.layout.last,
        "codec": setting.layout.codec,
        "store": to.url,
    }
