"""Staging: whose leftovers lie where shards wait for their upload."""

from collections.abc import Iterator

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.places import staging_folders
from paceline.doctor.world import World
from paceline.durable.amounts import size_text
from paceline.durable.staging import SHARED_MEMORY, Leftover, leftovers, staging_root
from paceline.watch.words import command_line

_FIND = Finder("staging")


def check(world: World) -> Iterator[Finding]:
    """A finding for each run that left something, live or dead."""
    folders = dict.fromkeys([*staging_folders(world.recipe, world.run_dir), SHARED_MEMORY])
    found = [(folder, left) for folder in folders for left in leftovers(folder)]
    for folder, left in found:
        is_own = left.path == staging_root(folder, world.run_dir.root)
        yield _finding(left, is_own=is_own)
    if not found:
        yield _FIND.ok(f"no run left anything in {', '.join(map(str, folders))}")


def _finding(left: Leftover, *, is_own: bool) -> Finding:
    whose = f"the run {left.run_root}" if left.run_root else "a run that it does not name"
    held = f"{left.path}: {size_text(left.bytes)} of {whose}"
    if left.is_live:
        return _FIND.note(f"{held}, which is at work", "it shares the room there with this run")
    if is_own:
        return _FIND.note(
            f"{held}, this one, which has ended; its next extract uploads what is whole"
        )
    what = f"{held}, which has ended" + (" and whose folder is gone" if left.is_orphan else "")
    why = (
        "it takes room that this run could stage in, and nothing reads it any more"
        if left.is_orphan
        else "it takes room that this run could stage in; only that run, continued, still needs it"
    )
    return _FIND.warning(what, why, command_line("rm", "-r", "--", left.path))
