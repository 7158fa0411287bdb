"""What an extraction says of itself, before and after."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.durable.session import oom_kills
from paceline.durable.staging import boot_id
from paceline.extract.destination import Destination
from paceline.extract.ledger import Survey
from paceline.extract.recovery import Standing, recovery_report
from paceline.extract.setting import Setting, tokens_of
from paceline.features.plan import Unit
from paceline.recipe.stage import read_record
from paceline.types.rows import Rows
from paceline.watch.events import EventWriter
from paceline.watch.words import bytes_text, counted, duration, short_bytes

_LOG = logging.getLogger(__name__)

_EVERY = 5.0
"""Seconds between two events that tell how much is proven."""


class ProvenTeller:
    """Tells, while what is there is looked at, how many of the `units` shards are proven by now."""

    def __init__(self, events: EventWriter, units: int, part: str) -> None:
        self._events = events
        self._part = part
        self._units = units
        self._told = -math.inf

    def __call__(self, proven: int, *, is_last: bool = False) -> None:
        """Now and then; the last one is always told."""
        if is_last or time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            self._events.emit(
                "checking",
                part=self._part,
                units=self._units,
                units_done=proven,
                units_skipped=proven,
            )


def announce(
    setting: Setting, rows: Rows, units: Sequence[Unit], found: Survey, estimate: int
) -> None:
    """Say what will be made, and how much of it is there."""
    _LOG.info(
        "extract: %s tokens of %s samples, layers %s%s, %s bytes a token; %s about %s in %s shards",
        f"{rows.tokens:,}",
        f"{len(rows):,}",
        ", ".join(map(str, setting.layout.layer_ids)),
        " and last" if setting.layout.last else "",
        f"{setting.layout.bytes_per_token:,}",
        "in all" if setting.layout.codec == "none" else f"with the codec {setting.layout.codec}",
        bytes_text(estimate),
        f"{len(units):,}",
    )
    if rows.other:
        _LOG.info(
            "extract: validation samples alone; %s others are captured while training",
            f"{rows.other:,}",
        )
    if setting.part.count > 1:
        count = sum(setting.part.holds(unit.index) for unit in units)
        _LOG.info("extract: part %s has %s shards of them", setting.part, f"{count:,}")
    if found.done:
        _LOG.info("extract: %s shards are done and verified", f"{len(found.done):,}")


def tell_recovery(
    setting: Setting,
    to: Destination,
    records: Sequence[Mapping[str, Any]],
    events: EventWriter,
    rows: Rows,
    units: Sequence[Unit],
    found: Survey,
    estimate: int,
) -> None:
    """Say how the last run ended and what is left of it, before anything else is said.

    `records` are the journal's before this process appended any.
    """
    done = [units[index] for index in found.done]
    paths = {"the run": setting.run_dir.root}
    if to.folder is not None:
        paths = {"the features": to.folder, **paths}
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
    recovery = recovery_report(
        records,
        setting.run_dir.events,
        standing,
        boot_id=boot_id(),
        oom_kills=oom_kills(),
        paths=paths,
        bytes_left=max(0, estimate - standing.bytes) if to.folder is not None else 0,
    )
    for line in recovery.lines:
        _LOG.log(logging.WARNING if recovery.was_unclean else logging.INFO, "extract: %s", line)
    if recovery.lines:
        events.emit("recovery", ending=recovery.ending, lines=list(recovery.lines))


def report_lines(numbers: Mapping[str, Any], uploads: tuple[int, float, float]) -> list[str]:
    """What was made; `uploads` are bytes, CPU seconds and wall seconds of the upload pool."""
    rate = numbers["tokens_per_s"]
    kept = (
        f"{numbers['samples']:,} samples with {numbers['tokens']:,} tokens in "
        f"{numbers['units'] - numbers['units_missing']:,} shards, {bytes_text(numbers['bytes'])}"
        + ("." if rate is None else f", {rate:,.0f} tokens/s.")
    )
    left_out = (
        f"of {numbers['samples_read']:,} samples read, {numbers['left_out_heldout']:,} are held "
        f"out for the score and {numbers['left_out_without_loss']:,} have no answer to train on."
    )
    if numbers["left_out_for_training"]:
        left_out = (
            f"{left_out.rstrip('.')}; {numbers['left_out_for_training']:,} are captured while "
            "training."
        )
    aside = numbers["quarantined_samples"]
    if numbers["samples_missing"]:
        left_out = (
            f"{left_out.rstrip('.')}; {aside:,} are in shards set aside, "
            f"{numbers['samples_missing'] - aside:,} in shards that are not there yet."
        )
    lines = [kept, left_out]
    sent, cpu_seconds, seconds = uploads
    if sent and seconds > 0:
        lines.append(
            f"uploaded {short_bytes(sent)}; that took {100 * cpu_seconds / seconds:.1f} % of one "
            f"core over {duration(seconds)} of work."
        )
    return lines


def corpus_gaps(setting: Setting, rows: Rows) -> list[str]:
    """Where the samples read are not as many as the corpus's stage recorded, or are not all in one
    of the counts; a sentence each, logged too. Raises IntegrityError for a damaged record.
    """  # noqa: D205
    name = "regenerate" if setting.recipe.regenerate.enabled else "prepare"
    record = read_record(setting.run_dir.corpus, name)
    found = []
    if record is not None and record.outputs:
        told = record.report
        # Held-out samples pass through `regenerate` as they are.
        keys = ("answered", "heldout") if name == "regenerate" else ("accepted",)
        written = sum(told[key] for key in keys) if all(key in told for key in keys) else rows.read
        if written != rows.read:
            found.append(
                f"{setting.source}: {rows.read:,} samples were read, and `paceline {name}` "
                f"recorded {written:,} written. Make the corpus anew, in another run directory "
                "(`--run DIR`)."
            )
    counts = len(rows) + rows.heldout + rows.without_loss + rows.other
    if counts != rows.read:
        found.append(
            f"{setting.source}: {rows.read:,} samples were read, and {counts:,} are to be "
            "extracted or left out. Paceline has lost count: report this."
        )
    for sentence in found:
        _LOG.warning("extract: %s", sentence)
    return found


def findings(found: Survey, leftovers: Sequence[str], *, again: int) -> list[str]:
    """What was not as it should have been, and what was done about it.

    `again` counts the shards that were begun again after a death or failure.
    """
    lines = [f"{key} was redone: {reason}." for key, reason in found.redo.items()]
    if again:
        lines.append(f"{counted(again, 'shard')} begun again after a worker's death or failure.")
    if found.adopted:
        lines.append(
            f"{counted(len(found.adopted), 'shard')} that no record of this run knew "
            f"{'was' if len(found.adopted) == 1 else 'were'} found whole and right, and taken over."
        )
    if leftovers:
        lines.append(f"removed {counted(len(leftovers), 'unfinished file')} of a killed run.")
    if found.foreign:
        lines.append(
            f"{counted(len(found.foreign), 'file')} of no shard of this plan, {found.foreign[0]} "
            "first; kept."
        )
    return lines
