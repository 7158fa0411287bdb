"""What this container may have of the machine's memory, by its control group."""

from dataclasses import dataclass
from pathlib import Path

_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
)
"""Limit, use and statistics of both versions, and what names begin with in the statistics."""


@dataclass(frozen=True)
class GroupMemory:
    """Bytes."""

    limit: int
    used: int
    """Without the page cache, which gives way; files in shared memory are no part of that."""

    @property
    def free(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def group_memory(root: Path = Path("/")) -> GroupMemory | None:
    """Limit and use of this container's memory; None where it has no limit.

    `root` is where `sys/fs/cgroup` lies.
    """
    group = root / "sys/fs/cgroup"
    for limit, used, statistics, prefix in _FILES:
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):
            continue
        return GroupMemory(most, max(0, now - _cached(group / statistics, prefix)))
    return None


def _cached(path: Path, prefix: str) -> int:
    """Bytes of files that memory holds a copy of; 0 where the system does not tell."""
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)
    except (OSError, ValueError):
        return 0
