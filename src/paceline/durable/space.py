"""Room on file systems: how much there is, when to pause, and who takes it."""

import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.amounts import size_text

_SPARE_SHARE = 0.01
_MOST_SPARE = 1 << 30


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    total: int
    used: int

    free: int
    """What this user may still write; used and free are less than total where some is reserved."""

    @property
    def share(self) -> float:
        """Used share of what this user could have, as `df` shows it."""
        usable = self.used + self.free
        return self.used / usable if usable else 1.0

    @property
    def spare(self) -> int:
        """What is left free of a file system that is being filled: a hundredth, at most 1 GiB.

        With not a byte free, more than this work comes to a halt: logs, journals, others.
        """
        return min(_MOST_SPARE, int(_SPARE_SHARE * (self.used + self.free)))


@dataclass(frozen=True)
class Mount:
    """Where a file system is mounted."""

    device: str
    point: Path
    kind: str
    """Such as `ext4`, `tmpfs`, `nfs4`."""


def read_space(path: Path) -> Space:
    """The room on the file system of `path`, or of its nearest folder that exists."""
    found = os.statvfs(nearest(path))
    block = found.f_frsize
    return Space(
        found.f_blocks * block, (found.f_blocks - found.f_bfree) * block, found.f_bavail * block
    )


def nearest(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def mount_of(path: Path, *, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount that `path` lies on. Raises OSError where the system does not tell."""
    place = Path(os.path.realpath(path))
    found: Mount | None = None
    for line in table.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        kind, device = after.split()[:2]
        # Of mounts on one point the last lies on top.
        if place.is_relative_to(point) and (found is None or point.is_relative_to(found.point)):
            found = Mount(_unescaped(device), point, kind)
    if found is None:
        raise OSError(f"{path}: no mount of {table} holds it")
    return found


def is_tmpfs(path: Path) -> bool:
    """Whether `path` lies in memory; False where the system does not tell."""
    try:
        return mount_of(path).kind in ("tmpfs", "ramfs")
    except OSError:
        return False


class SpaceWatch:
    """Pauses above the high mark, goes on at the low one; shares of the usable bytes.

    A high mark of 1 never pauses. Raises ValueError where the low mark is above the high one.
    """

    def __init__(
        self, path: Path, high: float, low: float, *, read: Callable[[Path], Space] = read_space
    ) -> None:
        if not 0 < low <= high <= 1:
            raise ValueError(f"marks {low} (low) and {high} (high): 0 < low <= high <= 1")
        self.path = path
        self.high = high
        self.low = low
        self._read = read
        self._is_paused = False
        self.space = Space(0, 0, 0)
        """As at the last check."""

    def check(self, *, is_drained: bool = False) -> bool:
        """Whether there may be more; looks at the file system.

        Drained, nothing of ours lies there that will go away, so the way back to the low mark is
        not ours to wait for: below the high mark is enough.
        """
        self.space = self._read(self.path)
        if self.space.share > self.high:
            self._is_paused = True
        elif self.space.share <= self.low or is_drained:
            self._is_paused = False
        return not self._is_paused

    def describe(self) -> str:
        """Such as `/data is 81 % full (1.2 TB free)`, as at the last check."""
        return (
            f"{self.path} is {100 * self.space.share:.0f} % full "
            f"({size_text(self.space.free)} free)"
        )


def who_uses(path: Path, *, limit: int = 5, seconds: float = 2.0) -> list[tuple[str, int]]:
    """The largest top-level entries of the file system of `path`, with their owners.

    Returns at most `limit` of (`/dev/shm/x of alice`, bytes), largest first. Takes about
    `seconds` at most: what was not counted by then is left out. Other mounts are not entered.
    """
    deadline = time.monotonic() + seconds
    point = mount_of(path).point
    device = point.stat().st_dev
    sizes: dict[str, int] = {}
    folders: list[tuple[str, Path]] = []
    for entry, found in _entries(point, device):
        name = f"{entry} of {_user(found.st_uid)}"
        sizes[name] = found.st_blocks * 512
        if stat.S_ISDIR(found.st_mode):
            folders.append((name, entry))
    for name, folder in folders:
        below = [folder]
        while below and time.monotonic() < deadline:
            for entry, found in _entries(below.pop(), device):
                sizes[name] += found.st_blocks * 512
                if stat.S_ISDIR(found.st_mode):
                    below.append(entry)
    return sorted(sizes.items(), key=lambda item: -item[1])[:limit]


def _entries(folder: Path, device: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if found.st_dev == device:
                    yield Path(entry.path), found
    except OSError:
        return


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field)
