"""`paceline verify`: what an extraction has made, and what is missing of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from paceline.cli.settings import Setting, settings_named
from paceline.cli.terminal import say
from paceline.durable.errors import UserError
from paceline.durable.fs import write_atomic
from paceline.durable.owner import holder, owned
from paceline.recipe.run_dir import RunDir
from paceline.recipe.write import is_run
from paceline.status import run_status
from paceline.watch.words import command_line, counted, short_bytes

if TYPE_CHECKING:
    from paceline.extract.inventory import Inventory, UnitRange
    from paceline.types.rows import Rows

_SHOWN_IDS = 3
_SHOWN_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Args:
    """Compares the features of a run with its corpus, journal and manifest, shard by shard: which
    are verified, missing, bad or quarantined, and which samples they hold. It needs neither the
    target nor a GPU, and refuses while a command is at work in the run.

    Reads: the record, journal and manifest of the extraction, its corpus, and of each shard its
    header and size; every byte with --deep.

    Writes: nothing, but what --ids and --repair say.

    Exit code: 0 where every shard is verified and nothing is wrong, though the manifest may not be
    published yet; 1 where not; 2 where there is no extraction to look at.

    Example: paceline verify runs/demo --deep
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    deep: Annotated[
        tyro.conf.FlagCreatePairsOff[bool],
        tyro.conf.arg(help_behavior_hint="(default: headers and sizes)"),
    ] = False
    """Read every byte and check every checksum."""
    repair: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """Write a damaged or lost journal anew from what the store proves, and keep the damaged one
    beside it; publish the manifest where every shard is verified. Shards are not touched: what is
    bad is made again by `paceline extract`."""
    json: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: text)")
    ] = False
    """Everything, as one JSON object, with the ids of all samples that are not verified."""
    ids: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """Write the ids of all samples that are not verified to this file, one a line. Its folder has
    to be there."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    from paceline.extract.inventory import (
        inventory_json,
        look,
        open_subject,
        read_papers,
        take_inventory,
        unproven_ids,
    )
    from paceline.extract.repair import repair

    run_dir = RunDir(args.run)
    if not is_run(args.run):
        raise UserError(f"{args.run}: not a run directory. Give one, such as runs/demo.")
    if args.ids is not None:
        _refuse_elsewhere(args.ids)
    lines: tuple[str, ...] = ()
    part = run_status(args.run).part
    with ExitStack() as held:
        if args.repair:
            held.enter_context(owned(args.run, "paceline verify --repair"))
        else:
            _refuse_at_work(args.run)
        subject = open_subject(run_dir)
        papers = read_papers(subject)
        found = look(subject, papers, deep=args.deep)
        inventory = take_inventory(subject, papers, found, is_deep=args.deep)
        if args.repair:
            lines = repair(subject, papers, found, publish=not inventory.is_published)
            inventory = take_inventory(subject, read_papers(subject), found, is_deep=args.deep)
    if args.ids is not None:
        ids = list(unproven_ids(inventory, subject.rows))
        with settings_named([Setting("--ids FILE", args.ids)]):
            write_atomic(args.ids, "".join(f"{sample_id}\n" for sample_id in ids).encode())
        lines = (*lines, f"{args.ids}: {counted(len(ids), 'sample id')} written.")
    if args.json:
        body = msgspec.json.format(inventory_json(inventory, subject.rows), indent=1)
        print(body.decode(), flush=True)
    else:
        for line in (*_report(inventory, subject.rows), *lines, *_next(args, inventory, part)):
            say(line)
    return 0 if inventory.is_whole else 1


def _refuse_elsewhere(path: Path) -> None:
    """Say before minutes of reading that the file could not be written."""
    if not path.parent.is_dir():
        raise UserError(f"--ids {path}: {path.parent} is no folder. Make it, or name another file.")
    if path.is_dir():
        raise UserError(f"--ids {path}: a folder. Name a file.")


def _refuse_at_work(root: Path) -> None:
    owner = holder(root)
    if owner is not None:
        raise UserError(
            f"{root}: `{owner.doing}` is at work here (process {owner.pid} on {owner.host}), so "
            f"what is missing now may be there in a minute. Wait for its end, or look at "
            f"`{command_line('paceline', 'status', root)}`."
        )


def _report(inventory: "Inventory", rows: "Rows") -> Iterator[str]:
    looked = "every byte read" if inventory.is_deep else "headers and sizes; --deep reads all"
    yield f"{inventory.store} ({looked})"
    yield from _table(inventory, rows)
    unverified = {"missing": inventory.missing, "bad": inventory.bad}
    unverified["quarantined"] = inventory.quarantined
    others = ", ".join(f"{count:,} {state}" for state, count in unverified.items())
    yield (
        f"verified: {inventory.verified:,} of {counted(inventory.units, 'shard')}, "
        f"{inventory.verified_samples:,} of {counted(inventory.samples, 'sample')}, "
        f"{short_bytes(inventory.bytes)}; {others}."
    )
    if inventory.samples_elsewhere:
        yield (
            f"{counted(inventory.samples_elsewhere, 'training sample')} left out on purpose: "
            f"train.online captures {'it' if inventory.samples_elsewhere == 1 else 'them'} while "
            "training."
        )
    for unit in inventory.failed[:_SHOWN_ROWS]:
        yield f"{unit.key} failed {counted(unit.attempts, 'time')}: {unit.reason}"
    if len(inventory.failed) > _SHOWN_ROWS:
        yield f"and {len(inventory.failed) - _SHOWN_ROWS:,} others failed (--json has them)."
    if inventory.foreign:
        yield (
            f"{counted(len(inventory.foreign), 'object')} of no shard of this plan, "
            f"{inventory.foreign[0]} first; left alone."
        )
    for problem in inventory.problems:
        yield f"problem: {problem}"


def _table(inventory: "Inventory", rows: "Rows") -> Iterator[str]:
    shown = inventory.ranges[:_SHOWN_ROWS]
    cells = [
        (
            f"shard {r.first}" if r.first == r.last else f"shards {r.first}-{r.last}",
            r.state,
            counted(r.samples, "sample"),
            short_bytes(r.bytes) if r.state == "verified" else _ids(r, rows),
            r.reason,
        )
        for r in shown
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    for shards, state, samples, what, reason in cells:
        line = f"{shards:<{widths[0]}}  {state:<{widths[1]}}  {samples:>{widths[2]}}  {what}"
        yield f"{line}  ({reason})" if reason else line
    if len(inventory.ranges) > _SHOWN_ROWS:
        yield f"and {len(inventory.ranges) - _SHOWN_ROWS:,} ranges more (--json has them)."


def _ids(found: "UnitRange", rows: "Rows") -> str:
    stop = min(found.stop, found.start + _SHOWN_IDS)
    names = ", ".join(rows.sample_ids[found.start : stop])
    return f"{names}, ..." if stop < found.stop else names


def _next(args: Args, inventory: "Inventory", part: str) -> Iterator[str]:
    shard = ("--shard", part) if part else ()
    again = f"`{command_line('paceline', 'extract', *shard, '--run', args.run)}`"
    if inventory.is_whole:
        yield "All is verified."
        if not inventory.is_published:
            yield (
                f"The manifest is not here yet: {again} takes over the one that another machine "
                "has published, or publishes it."
            )
        return
    if inventory.verified < inventory.units:
        of_part = f" of part {part}" if part else ""
        yield (
            f"{again} makes what is missing, bad or quarantined{of_part}; what is bad is left as "
            "it is until then."
        )
    if inventory.is_finished and inventory.problems:
        yield (
            "The extraction is finished, and what its manifest lists is verified: the journal is "
            "not needed any more, and this run is in no danger."
        )
    if inventory.problems and not args.repair:
        yield (
            f"`{command_line('paceline', 'verify', args.run, '--repair')}` mends the journal, and "
            "the manifest once every shard is verified."
        )
