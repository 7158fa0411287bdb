"""The end of an extraction: what is there, what is not, and the manifest where all is."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.durable.errors import IntegrityError
from paceline.durable.journal import Journal
from paceline.durable.store import Stat
from paceline.extract.destination import Destination
from paceline.extract.ledger import Survey, recorded
from paceline.extract.progress import Progress
from paceline.extract.rows import Rows
from paceline.extract.setting import Setting, tokens_of
from paceline.extract.telling import findings, report_lines
from paceline.features import manifest as manifests
from paceline.features.plan import Unit
from paceline.flow.units import Outcome
from paceline.recipe.stage import Report, StageRecord
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
    progress: Progress
    outcome: Outcome
    advice: Sequence[str]
    estimate: int
    """Bytes, before anything was made."""

    @property
    def missing(self) -> list[Unit]:
        """Units that are not verified."""
        return [unit for unit in self.units if unit.index not in self.stats]


def conclude(
    setting: Setting,
    to: Destination,
    record: StageRecord,
    journal: Journal,
    events: EventWriter,
    result: Result,
    *,
    leftovers: Sequence[str],
) -> Report:
    """Publish the manifest where all is there, and say how it stands."""
    missing, progress = result.missing, result.progress
    elsewhere = _set_aside_elsewhere(to, record.fingerprint) if setting.part.count > 1 else {}
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
    lines = [
        f"{progress.line()}.",
        *report_lines(numbers, progress.uploads()),
        *result.advice,
        *findings(result.found, leftovers),
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
        path = manifests.publish(setting.run_dir.features, manifest)
        if to.url:
            to.store.put(manifests.FILE_NAME, path)
        record.finish([path], numbers)
    elif len(missing) > len(aside):
        others = len(missing) - len(aside)
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
        kind = "failed" if undone else "interrupted"
        error = _in_short(undone) if undone else lines[-1]
        events.emit(kind, progress.counts(), **progress.more(), error=error)
    return Report(stage="extract", numbers=numbers, lines=tuple(lines), undone=undone)


def _in_short(undone: Sequence[str]) -> str:
    more = len(undone) - _NAMED
    return "\n".join([*undone[:_NAMED], *([f"and {more:,} more"] if more > 0 else [])])


def _set_aside(journal: Journal, fingerprint: str, result: Result) -> dict[str, str]:
    """Units without a shard that were given up, here or by an earlier run: key to reason."""
    before = recorded(journal.records, fingerprint).quarantined
    reasons = {**before, **result.outcome.quarantined}
    return {unit.key: reasons[unit.key] for unit in result.missing if unit.key in reasons}


def _set_aside_elsewhere(to: Destination, fingerprint: str) -> dict[str, str]:
    """Units that the machine which has published gave up: no other machine's journal has them."""
    for found in to.store.list(manifests.FILE_NAME):
        # One that is damaged tells nothing, and is published anew.
        with suppress(IntegrityError):
            data = to.store.get_range(found.key, 0, found.size)
            published = manifests.decode(data, f"{to.store.url}/{found.key}")
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
        "left_out_heldout": rows.heldout,
        "left_out_without_loss": rows.without_loss,
        "quarantined_samples": sum(u.stop - u.start for u in missing if u.key in aside),
        "samples_missing": lost_samples,
        "units": len(result.units),
        "units_missing": len(missing),
        "units_of_earlier_runs": len(result.found.done),
        "units_redone": len(result.found.redo),
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
