"""`paceline stop`: ends what is at work in a run directory, and proves that nothing is left."""

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.cli.terminal import say
from paceline.durable.errors import PacelineError, UserError
from paceline.durable.fs import PARTIAL, REAL_FS
from paceline.durable.owner import LOCK, Owner, holder, owned
from paceline.durable.staging import SHARED_MEMORY, staged_bytes
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.write import is_run
from paceline.status import run_status
from paceline.watch.words import counted, duration, short_bytes

if TYPE_CHECKING:
    import psutil

_TELL_EVERY = 5.0
_LOOK_EVERY = 0.2
_AFTER_KILL = 10.0
"""Seconds for the kernel to end what was killed."""
_SETTLE = 2.0
"""Seconds in which processes that are ending let go of their files."""

_OURS = re.compile(rf"\.(\d+)\{PARTIAL}$|^step_\d+\{PARTIAL}$")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Stops the command that is at work in a run directory: it finishes what it has in work, ends
    in a state to go on from, and nothing of it is left, neither a process nor a temporary file in
    the run directory. Shards that wait in staging for their upload stay, and are named.

    Reads: the run's lock, recipe and events, the processes of this machine, and the names in the
    run's staging folders.

    Writes: nothing; removes temporary files that dead processes left in the run directory.

    Example: paceline stop runs/demo
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    grace: Annotated[
        float, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="(default: 600)")
    ] = 600.0
    """How long to wait for the work in hand to be finished."""
    kill: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: no)")
    ] = False
    """After the grace period, kill what is left."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    root = args.run
    _check(args)
    found = _find(root)
    family: set[psutil.Process] = set()
    if found is not None:
        family = _end(*found, args)
    with owned(root, "paceline stop") as died:
        if died is not None and (found is None or died.pid != found[0].pid):
            say(f"`{died.doing}` (process {died.pid} on {died.host}) had ended without a word.")
        _prove(root, family)
    for line in _staged(RunDir(root)):
        say(line)
    done = (
        "nothing was running; no temporary file is left in the run directory."
        if found is None
        else "stopped: no process of the run and no temporary file in its directory is left."
    )
    command = run_status(root).command
    say(f"{done} Go on with: {command}" if command else f"{done} The run is finished.")
    return 0


def _staged(run_dir: RunDir) -> Iterator[str]:
    """What waits for its upload, a sentence a folder; the run goes on with it."""
    folders = {SHARED_MEMORY, run_dir.staging}
    with contextlib.suppress(PacelineError):
        staging = load_recipe(run_dir.recipe).extract.staging
        folders |= set() if staging == "auto" else {Path(staging)}
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            place, size = staged_bytes(folder, run_dir.root)
            if size:
                yield (
                    f"{place} holds {short_bytes(size)} of shards that wait for their upload: the "
                    "command below goes on with them."
                )


def _check(args: Args) -> None:
    if not (is_run(args.run) or (args.run / LOCK).is_file()):
        raise UserError(
            f"{args.run}: not a run directory: no command has run there. Give the folder that "
            "`paceline run` was given, or printed."
        )
    if not (math.isfinite(args.grace) and args.grace >= 0):
        raise UserError(f"--grace {args.grace}: give seconds, 0 or more.")


def _find(root: Path) -> "tuple[Owner, psutil.Process] | None":
    """The owner and its process; None where nobody is at work."""
    from paceline.durable.processes import process_with

    tries = 5
    while (owner := holder(root)) is not None:
        if owner.host != socket.gethostname():
            raise UserError(
                f"{root}: `{owner.doing}` runs on another machine: process {owner.pid} on "
                f"{owner.host}. Run `paceline stop` there."
            )
        process = process_with(owner.pid, since=owner.since, file=root / LOCK)
        if process is not None:
            return owner, process
        tries -= 1
        if not tries:
            raise PacelineError(
                f"{root}: held by `{owner.doing}`, process {owner.pid} on {owner.host}, but on "
                "this machine that process is another one. Is it in a container? Run `paceline "
                "stop` there."
            )
        # It may have ended just now, and another may have begun.
        time.sleep(_LOOK_EVERY)
    return None


def _end(owner: Owner, process: "psutil.Process", args: Args) -> "set[psutil.Process]":
    """Signal the owner and wait for it and all that it started; returns them, all ended.

    Raises PacelineError, naming them, where some are left.
    """
    from paceline.durable.processes import descendants, in_words, is_alive, wait_while

    family = {process, *descendants(process)}
    _signal(process, signal.SIGTERM)
    for member in family:
        _wake(member)
    stage = _stage(args.run, owner)
    say(
        f"`{owner.doing}` (process {process.pid}) was sent SIGTERM. Waiting up to "
        f"{duration(args.grace)} for it to finish what it has in work: {stage}."
    )
    started = told = time.monotonic()
    while left := [member for member in family if is_alive(member)]:
        now = time.monotonic()
        if now - started >= args.grace:
            break
        if now - told >= _TELL_EVERY:
            told = now
            workers = len(left) - (process in left)
            say(f"waiting for {_stage(args.run, owner)}: {duration(now - started)}, "
                f"process {process.pid} and {workers} that it started")  # fmt: skip
        time.sleep(min(_LOOK_EVERY, args.grace))
        family |= descendants(process)
    if left and args.kill:
        say(f"not ended after {duration(args.grace)}: killing {counted(len(left), 'process')}.")
        # The owner first: it would only tell of its workers' deaths, or start others.
        for member in sorted(left, key=lambda member: member != process):
            _signal(member, signal.SIGKILL)
        left = sorted(wait_while(family, _AFTER_KILL), key=lambda member: member.pid)
    if left:
        names = "; ".join(in_words(member) for member in left)
        advice = (
            "Look at the disk or the mount that it waits for."
            if args.kill
            else "Wait longer (`--grace SECONDS`), or add `--kill`: what is complete stays."
        )
        raise PacelineError(
            f"{args.run}: still at work in {_stage(args.run, owner)}: {names}. {advice}"
        )
    return family


def _signal(process: "psutil.Process", number: signal.Signals) -> None:
    import psutil

    try:
        # psutil refuses where the id is another process's by now.
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise UserError(
            f"process {process.pid} is another user's. Run `paceline stop` as that user."
        ) from error


def _wake(process: "psutil.Process") -> None:
    """Let a process that was suspended (Ctrl-Z) go on: it could not even end."""
    import psutil

    with contextlib.suppress(psutil.Error):
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()


def _stage(root: Path, owner: Owner) -> str:
    """The stage that told something last; the command where none did."""
    told: dict[float, str] = {}
    for path in RunDir(root).events.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            told[path.stat().st_mtime] = path.stem
    return told[max(told)] if told else f"`{owner.doing}`"


def _prove(root: Path, family: "set[psutil.Process]") -> None:
    """Hold the run while this looks. Raises PacelineError, naming all that is left."""
    from paceline.durable.processes import in_words, is_writer, openers, wait_while

    left = [f"{in_words(process)} has not ended" for process in wait_while(family, 0.0)]
    folders = _folders(root)
    end = time.monotonic() + _SETTLE
    open_files, hidden = openers(folders)
    while open_files and time.monotonic() < end:
        time.sleep(_LOOK_EVERY)
        open_files, hidden = openers(folders)
    in_use = {path for paths in open_files.values() for path in paths}
    left += [
        f"{in_words(process)} has {_short(paths[0], root)} open"
        for process, paths in open_files.items()
    ]
    for path in _partials(folders):
        name = _short(str(path), root)
        match = _OURS.search(path.name)
        if match is None:
            left.append(f"{name} is no file of Paceline's; look at it and remove it")
        elif any(used == str(path) or used.startswith(f"{path}{os.sep}") for used in in_use):
            left.append(f"{name} is being written")
        elif match[1] and is_writer(int(match[1]), path):
            left.append(f"{name} belongs to process {match[1]}, which is alive")
        else:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                REAL_FS.unlink(path)
            say(f"removed {name}, left half-written by a process that is dead.")
    if hidden and _is_open_to_others(folders):
        others = counted(hidden, "process")
        say(f"note: {others} of other users could not be looked into for files of this run.")
    if left:
        raise PacelineError(f"{root}: not everything is gone: {'; '.join(left)}.")


def _folders(root: Path) -> list[Path]:
    """The run directory and what its entries may be links to, each without links in it."""
    places = {root.resolve(), *(path.resolve() for path in root.iterdir() if path.is_dir())}
    return sorted(place for place in places if not any(above in places for above in place.parents))


def _is_open_to_others(folders: list[Path]) -> bool:
    """Whether another user could have files below open, unseen by this one."""
    # Root sees everyone's: what stays hidden from it is the kernel's, or of another container.
    return os.geteuid() != 0 and any(folder.stat().st_mode & 0o077 for folder in folders)


def _partials(folders: list[Path]) -> Iterator[Path]:
    """Everything below that is being written, or was: files, and folders as a whole."""
    for top in folders:
        for folder, names, files in os.walk(top):
            partial = [name for name in names if name.endswith(PARTIAL)]
            names[:] = [name for name in names if name not in partial]
            for name in sorted([*partial, *(f for f in files if f.endswith(PARTIAL))]):
                yield Path(folder) / name


def _short(path: str, root: Path) -> str:
    return path.removeprefix(f"{root.resolve()}{os.sep}")
