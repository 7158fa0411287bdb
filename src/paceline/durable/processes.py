"""Processes of this machine: which one it is, what it has started, who has a file open."""

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

_SLACK = 2.0
"""Seconds by which the start of a process, reckoned from that of the machine, may be off."""

_COMMAND_LIMIT = 60


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process still runs: not ended, no other one under its id, no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def process_with(pid: int, *, since: float, file: Path) -> psutil.Process | None:
    """The process `pid`, if it is the one that has had `file` open since `since`, a time().

    An id alone proves nothing: it may long be another process's. Where this user may not see
    what the process has open, it must at least run Paceline and have begun before `since`.
    """
    try:
        process = psutil.Process(pid)
        if not is_alive(process):
            return None
        try:
            found = str(file.resolve()) in set(_open_files(process))
        except (PermissionError, psutil.AccessDenied):
            runs_paceline = "paceline" in " ".join(process.cmdline())
            found = runs_paceline and process.create_time() <= since + _SLACK
    except (psutil.NoSuchProcess, ValueError):
        return None
    return process if found else None


def is_writer(pid: int, path: Path) -> bool:
    """Whether a live process `pid` may have written `path`: it began before the last change."""
    try:
        process = psutil.Process(pid)
        return is_alive(process) and process.create_time() <= path.stat().st_mtime + _SLACK
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """What it has started, and what that has started; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def wait_while(processes: Iterable[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Those of them that are left after at most `seconds`."""
    end = time.monotonic() + seconds
    left = set(filter(is_alive, processes))
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = set(filter(is_alive, left))
    return left


def openers(folders: Collection[Path]) -> tuple[dict[psutil.Process, list[str]], int]:
    """Processes other than this one that have files below `folders` open or mapped.

    Returns their paths by process, and the number of processes that this user may not look into.
    """
    below = tuple(f"{folder}{os.sep}" for folder in folders)
    found: dict[psutil.Process, list[str]] = {}
    hidden = 0
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            paths = sorted({path for path in _open_files(process) if path.startswith(below)})
        except (PermissionError, psutil.AccessDenied):
            hidden += 1
            continue
        except psutil.NoSuchProcess:
            continue
        if paths:
            found[process] = paths
    return found, hidden


def in_words(process: psutil.Process) -> str:
    """`process 4711 (python -m paceline run)`."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline()) or process.name()
        if len(command) > _COMMAND_LIMIT:
            command = command[:_COMMAND_LIMIT] + "..."
        if process.status() == psutil.STATUS_DISK_SLEEP:
            command += "; the kernel holds it in a read or write"
        return f"process {process.pid} ({command})"
    return f"process {process.pid}"


def _open_files(process: psutil.Process) -> Iterator[str]:
    """Paths that a process has open, and those that it has mapped where the system tells."""
    proc = Path("/proc") / str(process.pid)
    if not (proc / "fd").is_dir():
        yield from (file.path for file in process.open_files())
        return
    try:
        for descriptor in (proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield str(descriptor.readlink())
        # A mapped file needs no descriptor: that is how shards are read.
        for line in (proc / "maps").read_text(errors="surrogateescape").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process.pid) from error
