"""CPU time of threads of this process that Python did not start."""

import os
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")


def named_threads_seconds(prefix: str) -> float:
    """CPU seconds of the threads of this process whose names begin with `prefix`.

    0.0 where the system does not tell. Threads that have ended are not counted.
    """
    if not _TASKS.is_dir():
        return 0.0
    ticks = 0
    for task in _TASKS.iterdir():
        # A thread may end while it is looked at.
        with suppress(OSError):
            name, fields = _split((task / "stat").read_text(encoding="utf-8", errors="replace"))
            if name.startswith(prefix):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _split(line: str) -> tuple[str, list[str]]:
    """The name, which may hold spaces and brackets, and the fields from the third on."""
    before, _, after = line.rpartition(")")
    return before.partition("(")[2], after.split()
