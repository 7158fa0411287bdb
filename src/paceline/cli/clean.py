"""`paceline clean`: frees what a run no longer needs, and touches nothing else."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.cli.terminal import say
from paceline.durable.errors import UserError
from paceline.durable.owner import holder, owned
from paceline.recipe.run_dir import RunDir
from paceline.recipe.write import is_run
from paceline.watch.words import bytes_text, command_line, counted

if TYPE_CHECKING:
    from paceline.extract.cleanable import Item, Kind

_SHOWN = 20
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Args:
    """Says what of a run could be removed, and removes it with --yes: half-written files of dead
    processes, local copies of an object store's shards, leftovers in staging; with the flags below
    checkpoints and the features too. Only what the run's own papers list is ever removed; all else
    is named and left. It refuses while a command is at work in the run.

    Reads: journal, manifest and records of the run, and the names in its folders.

    Writes: nothing, unless --yes; it may be killed and run again.

    Exit code: 0 where all that was asked for is done, or could be; 1 where something could not be
    removed; 2 where it is refused.

    Example: paceline clean runs/demo --checkpoints --yes
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    features: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """The shards, manifest and journal, once the training has come to its end. The score needs
    none of them; another training would have to extract again."""
    checkpoints: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """Checkpoints other than the best and the newest ones; those set aside, too."""
    keep: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 2)")] = 2
    """How many of the newest checkpoints stay."""
    force: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """With --features: though the training has not come to its end."""
    yes: Annotated[
        tyro.conf.FlagCreatePairsOff[bool],
        tyro.conf.arg(help_behavior_hint="(default: only say what would go)"),
    ] = False
    """Do it."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    from paceline.extract.clean import Wanted, carry_out, plan_clean

    if not is_run(args.run):
        raise UserError(f"{args.run}: not a run directory. Give one, such as runs/demo.")
    run_dir = RunDir(args.run)
    wanted = Wanted(
        features=args.features, checkpoints=args.checkpoints, keep=args.keep, force=args.force
    )
    with ExitStack() as held:
        if args.yes:
            held.enter_context(owned(args.run, "paceline clean"))
        else:
            _refuse_at_work(args.run)
        plan = plan_clean(run_dir, wanted)
        for line in (*_listed(plan.items), *_left(plan.left)):
            say(line)
        if not args.yes:
            if plan.items:
                say(f"would free {bytes_text(plan.bytes)}. {_again(args)}")
            else:
                say("nothing to remove.")
            return 0
        done = carry_out(plan, run_dir)
    for line in done.failed:
        say(f"not done: {line}")
    say(f"removed {counted(done.removed, 'item')}, {bytes_text(done.bytes)} freed.")
    return 1 if done.failed else 0


def _refuse_at_work(root: Path) -> None:
    owner = holder(root)
    if owner is not None:
        raise UserError(
            f"{root}: `{owner.doing}` is at work here (process {owner.pid} on {owner.host}). "
            "Nothing is removed under a command at work: wait for its end, or stop it."
        )


def _listed(items: "tuple[Item, ...]") -> Iterator[str]:
    for kind, group in groupby(sorted(items, key=_kind), key=_kind):
        found = list(group)
        names = ", ".join(item.name for item in found[:_NAMED])
        more = ", ..." if len(found) > _NAMED else ""
        size = bytes_text(sum(item.bytes for item in found))
        yield f"{_counted(kind, len(found))}, {size}: {names}{more}"


def _kind(item: "Item") -> "Kind":
    return item.kind


def _counted(kind: "Kind", count: int) -> str:
    match kind:
        case "partial":
            return f"{counted(count, 'half-written file')} of dead processes"
        case "kept":
            return "what an online training has kept"
        case "copy":
            return f"{counted(count, 'local file')} with copies of shards"
        case "staged":
            return f"{counted(count, 'file')} in staging"
        case "paper":
            return f"{counted(count, 'file')} about the shards"
        case _:
            return counted(count, kind)


def _left(left: tuple[str, ...]) -> Iterator[str]:
    for line in left[:_SHOWN]:
        yield f"left: {line}"
    if len(left) > _SHOWN:
        yield f"left: {len(left) - _SHOWN:,} others."


def _again(args: Args) -> str:
    flags = [f"--{name}" for name in ("features", "checkpoints", "force") if getattr(args, name)]
    if args.checkpoints:
        flags += ["--keep", str(args.keep)]
    return f"To do it: `{command_line('paceline', 'clean', args.run, *flags, '--yes')}`"
