"""The first look at each path, by a process that can be left behind.

A path on a frozen mount neither fails nor answers, and a process that asked for it cannot end. So
another one asks, and whoever gave no answer in time is looked at no further.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from paceline.durable.limit import Call

_PROGRAM = """
import json, os, stat, sys

def look(path):
    at = path
    while not os.path.lexists(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    found = {"path": path, "at": at, "kind": "none", "error": ""}
    try:
        mode = os.stat(at).st_mode
        if at == path:
            found["kind"] = "folder" if stat.S_ISDIR(mode) else "file"
            if stat.S_ISDIR(mode):
                with os.scandir(path) as entries:
                    next(entries, None)
            else:
                with open(path, "rb", buffering=0) as file:
                    file.read(1)
        space = os.statvfs(at)
        found["is_writable"] = os.access(at, os.W_OK)
        found["is_read_only"] = bool(space.f_flag & os.ST_RDONLY)
        found["total"] = space.f_frsize * space.f_blocks
        found["free"] = space.f_frsize * space.f_bavail
        found["device"] = os.stat(at).st_dev
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found

for path in sys.argv[1:]:
    print(json.dumps(look(path)), flush=True)
"""
"""Standard library alone, so that it starts in a few milliseconds."""

_PROCESSES = 32
"""Of more paths, some are asked one after the other."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a path said."""

    path: str
    at: str
    """The path itself, or the nearest folder above it that exists."""
    kind: Literal["file", "folder", "none", "silent"] = "none"
    """`none`: does not exist; `silent`: did not answer, or was not reached behind one that did
    not, and nothing else here is known."""
    error: str = ""
    """Why it cannot be read, in the system's words."""
    is_writable: bool = False
    """Whether this user may write at `at`."""
    is_read_only: bool = False
    """Whether its file system is mounted so."""
    total: int = 0
    """Bytes of its file system."""
    free: int = 0
    """Bytes of them that this user may still take."""
    device: int = -1
    """Number of its file system."""


def touch(paths: Iterable[Path], seconds: float) -> Mapping[Path, Answer]:
    """Look at each path, all at once, for at most `seconds`; changes nothing.

    A file is opened and its first byte read, a folder's first name listed. Paths are taken as they
    are: absolute ones are expected.
    """
    distinct = list(dict.fromkeys(paths))
    groups = [distinct[first::_PROCESSES] for first in range(min(_PROCESSES, len(distinct)))]
    calls = [(group, Call(lambda group=group: _ask(group, seconds), "touch")) for group in groups]
    return {
        path: answer
        for group, call in calls
        for path, answer in zip(group, call.result(seconds + 5.0), strict=True)
    }


def _ask(paths: list[Path], seconds: float) -> list[Answer]:
    """The answers of paths that are asked one after the other."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, paths)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        output = late.output or b""
        process.kill()
        # One that the kernel holds does not even die: nobody waits for it then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        if process.stdout is not None:
            process.stdout.close()
    found = [msgspec.json.decode(line, type=Answer) for line in output.splitlines()[: len(paths)]]
    silent = [
        Answer(path=os.fspath(path), at=os.fspath(path), kind="silent")
        for path in paths[len(found) :]
    ]
    return found + silent
