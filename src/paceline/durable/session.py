"""Sessions in a journal: when a process began to work with it, how it ended, and on what machine.

A session without an end is the trace of a process that was killed.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from paceline.durable.staging import boot_id

SESSION = "session"
ENDED = "ended"

HowEnded = Literal["finished", "interrupted", "failed"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def session_record(
    records: Iterable[Mapping[str, Any]], software: Mapping[str, Any]
) -> dict[str, Any]:
    """What a process appends to a journal of these `records` before its first unit."""
    return {
        "kind": SESSION,
        "session": 1 + sum(record.get("kind") == SESSION for record in records),
        "software": dict(software),
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "at": round(time.time(), 3),
        "oom_kills": oom_kills(),
    }


def end_record(how: HowEnded, error: str = "") -> dict[str, Any]:
    """What it appends last; `error` in words."""
    return {"kind": ENDED, "how": how, "error": error, "at": round(time.time(), 3)}


def oom_kills(own: Path = _OWN_CGROUPS, root: Path = _CGROUPS) -> int | None:
    """Processes that the kernel has killed for want of memory around this one.

    Counted in the outermost control group that tells: the inner one of a service or a login is
    made anew, and counts from 0, when that is started again. None where none can be read.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in sorted(lines, key=lambda line: line.startswith("0::")):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, name = root / "memory", "memory.oom_control"
        elif not controllers:
            top, name = root, "memory.events"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            count = _count(top.joinpath(*parts[:depth], name))
            if count is not None:
                return count
    return None


def _count(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeError):
        return None
    counts = [pair[1] for pair in words if len(pair) == 2 and pair[0] == "oom_kill"]
    return int(counts[0]) if counts and counts[0].isdecimal() else None
