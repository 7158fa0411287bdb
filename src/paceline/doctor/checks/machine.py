"""Limits, memory and the clock of this machine."""

import re
import resource
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.group_memory import group_memory
from paceline.doctor.world import World
from paceline.durable.amounts import size_text, span_text
from paceline.durable.staging import SHARED_MEMORY
from paceline.recipe.extract_inputs import is_object_store
from paceline.watch.tail import last_events

_LIMITS = Finder("limits")
_MEMORY = Finder("memory")
_CLOCK = Finder("clock")

_FILES = 1024
_SHM_BYTES = 1 << 30
_LOW_SHARE = 0.1
_SKEW = 60.0
"""Seconds that clocks of two machines may differ."""

_BUILT = 1_700_000_000.0
"""Seconds since the epoch; no clock that is set shows a time before this program was written."""


def check_limits(world: World) -> Iterator[Finding]:
    """Open files, the size of a file, shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        allowed = hard if hard != resource.RLIM_INFINITY else 65536
        yield _LIMITS.warning(
            f"at most {soft} open files",
            "workers, shards and connections need more",
            f"ulimit -n {max(soft, min(allowed, 65536))}",
        )
    else:
        yield _LIMITS.ok(f"{'any number of' if soft < 0 else soft} open files")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY and size < world.recipe.extract.shard_bytes:
        yield _LIMITS.error(
            f"a file may have {size_text(size)} at most",
            f"a shard has about {size_text(world.recipe.extract.shard_bytes)}",
            "ulimit -f unlimited",
        )
    yield from _shared_memory(world)


def _shared_memory(world: World) -> Iterator[Finding]:
    extract = world.recipe.extract
    if not is_object_store(extract.store) or extract.staging != "auto":
        return
    answer = world.answers.get(SHARED_MEMORY)
    if answer is None or answer.kind == "silent":
        return
    if answer.kind == "none" or answer.total < _SHM_BYTES:
        yield _LIMITS.warning(
            f"shared memory: {size_text(answer.total if answer.kind == 'folder' else 0)} "
            f"at {SHARED_MEMORY}",
            "shards are staged on the run's disk instead, which is slower",
            "start the container with --shm-size=16g, or sudo mount -o remount,size=16g /dev/shm",
        )
    else:
        yield _LIMITS.ok(f"shared memory: {size_text(answer.free)} free at {SHARED_MEMORY}")


def check_memory(world: World) -> Iterator[Finding]:
    """What is free of the host's memory, and whether it has been short."""
    table = _meminfo(world.root)
    if "MemTotal" not in table or "MemAvailable" not in table:
        yield _MEMORY.note("not looked at: the system does not tell how much there is")
        return
    total, available = table["MemTotal"], table["MemAvailable"]
    group = group_memory(world.root)
    if group is not None and group.limit < total:
        total, available = group.limit, min(available, group.free)
    state = f"{size_text(available)} of {size_text(total)} available"
    swap = table.get("SwapTotal", 0) - table.get("SwapFree", 0)
    if available < _LOW_SHARE * total:
        yield _MEMORY.warning(
            state, "the system kills processes when it runs out", "ps aux --sort=-rss | head"
        )
    else:
        yield _MEMORY.ok(state)
    if swap > _LOW_SHARE * total:
        yield _MEMORY.warning(
            f"{size_text(swap)} are swapped out",
            "memory has been short here, and what is swapped out is a thousand times slower",
            "ps aux --sort=-rss | head",
        )


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    rows = (re.fullmatch(r"(\w+):\s+(\d+) kB", line) for line in lines)
    return {row[1]: int(row[2]) << 10 for row in rows if row}


def check_clock(world: World) -> Iterator[Finding]:
    """The date against what this run has already written."""
    newest = max(
        (
            float(event["t"])
            for path in world.run_dir.events.glob("*.jsonl")
            for event in _newest(path)
        ),
        default=0.0,
    )
    why = "signed requests to an object store are refused, and ages and rates come out wrong"
    mend = "sudo timedatectl set-ntp true"
    if newest - world.now > _SKEW:
        yield _CLOCK.error(
            f"it is {span_text(newest - world.now)} earlier than this run's newest event", why, mend
        )
    elif world.now < _BUILT:
        yield _CLOCK.error("the clock has not been set since the machine started", why, mend)
    else:
        yield _CLOCK.ok("the date is not before this run's newest event")


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    """The last event of a file, where it has one."""
    yield from islice(last_events(path), 1)
