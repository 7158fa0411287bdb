"""What an extraction says of itself, before and after."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.extract.ledger import Survey
from paceline.extract.rows import Rows
from paceline.extract.setting import Setting
from paceline.features.plan import Unit
from paceline.watch.words import bytes_text, counted, duration, short_bytes

_LOG = logging.getLogger(__name__)


def announce(
    setting: Setting, rows: Rows, units: Sequence[Unit], found: Survey, estimate: int
) -> None:
    """Say what will be made, and how much of it is there."""
    _LOG.info(
        "extract: %s tokens of %s samples, layers %s%s, %s bytes a token%s: about %s in %s shards",
        f"{rows.tokens:,}",
        f"{len(rows):,}",
        ", ".join(map(str, setting.layout.layer_ids)),
        " and last" if setting.layout.last else "",
        f"{setting.layout.bytes_per_token:,}",
        "" if setting.layout.codec == "none" else f" before the codec {setting.layout.codec}",
        bytes_text(estimate),
        f"{len(units):,}",
    )
    if setting.part.count > 1:
        count = sum(setting.part.holds(unit.index) for unit in units)
        _LOG.info("extract: part %s has %s shards of them", setting.part, f"{count:,}")
    if found.done:
        _LOG.info("extract: %s shards are done and verified", f"{len(found.done):,}")


def report_lines(numbers: Mapping[str, Any], uploads: tuple[int, float, float]) -> list[str]:
    """What was made; `uploads` are bytes, CPU seconds and wall seconds of the upload pool."""
    rate = numbers["tokens_per_s"]
    read = (
        numbers["samples"]
        + numbers["samples_missing"]
        + numbers["left_out_heldout"]
        + numbers["left_out_without_loss"]
    )
    kept = (
        f"{numbers['samples']:,} samples with {numbers['tokens']:,} tokens in "
        f"{numbers['units'] - numbers['units_missing']:,} shards, {bytes_text(numbers['bytes'])}"
        + ("." if rate is None else f", {rate:,.0f} tokens/s.")
    )
    left_out = (
        f"of {read:,} samples read, {numbers['left_out_heldout']:,} are held out for the score "
        f"and {numbers['left_out_without_loss']:,} have no answer to train on."
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
            f"uploaded {short_bytes(sent)} in {duration(seconds)} with "
            f"{100 * cpu_seconds / seconds:.1f} % of one core."
        )
    return lines


def findings(found: Survey, leftovers: Sequence[str]) -> list[str]:
    """What was not as it should have been, and what was done about it."""
    lines = [f"{key} was redone: {reason}." for key, reason in found.redo.items()]
    if found.adopted:
        lines.append(
            f"{counted(len(found.adopted), 'shard')} that no record of this run knew "
            f"{'was' if len(found.adopted) == 1 else 'were'} found whole and right, and taken over."
        )
    if leftovers:
        lines.append(f"removed {counted(len(leftovers), 'unfinished file')} of a killed run.")
    if found.foreign:
        lines.append(
            f"{counted(len(found.foreign), 'file')} of no unit of this plan, {found.foreign[0]} "
            "first; kept."
        )
    return lines
