"""Whose a process is: its user, command and systemd unit, or that it lies outside of here."""

import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.watch.words import command_line

_INITIAL = "pid:[4026531836]"
"""The machine's own namespace of process ids, a constant of the kernel (PROC_PID_INIT_INO)."""

_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:$|/)")
_COMMAND_LIMIT = 60
_NVIDIA = "/dev/nvidia"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose a process is."""

    pid: int
    where: Literal["here", "outside", "unseen"]
    """`outside` of this container; `unseen`: it has ended, or is hidden from this user."""
    command: str = ""
    user: str = ""
    unit: str = ""
    """The systemd service that it belongs to; empty where it belongs to none."""
    is_users_unit: bool = False
    """Whether that is a service of the user's own systemd, not of the machine's."""
    container: str = ""
    """First 12 digits of the container's id; empty where it is in none."""

    def in_words(self) -> str:
        """Such as `process 4711 (vllm serve), unit vllm.service, user ann`."""
        if self.where == "outside":
            return f"process {self.pid}, outside this container"
        if self.where == "unseen":
            return f"process {self.pid}, which this user cannot see"
        parts = [f"process {self.pid} ({self.command or 'no command line'})"]
        if self.unit:
            parts.append(f"{'user ' if self.is_users_unit else ''}unit {self.unit}")
        if self.container:
            parts.append(f"container {self.container}")
        parts.append(f"user {self.user or 'unknown'}")
        return ", ".join(parts)

    def mend(self) -> str:
        """The command that ends it, so that it stays ended after the next boot."""
        if self.where == "outside":
            return f"on the machine itself: ps -fp {self.pid}; cat /proc/{self.pid}/cgroup"
        if self.where == "unseen":
            return command_line("sudo", "ps", "-fp", str(self.pid))
        if self.unit and self.is_users_unit:
            return command_line("systemctl", "--user", "disable", "--now", self.unit)
        if self.unit:
            return command_line("sudo", "systemctl", "disable", "--now", self.unit)
        if self.container:
            return f"docker update --restart=no {self.container} && docker stop {self.container}"
        own = self.user == _user_name(os.getuid())
        return command_line(*(() if own else ("sudo",)), "kill", str(self.pid))


def owner_of(pid: int, root: Path = Path("/"), *, holds_gpu: bool = False) -> Owner:
    """Whose the process `pid` is, a number as the machine counts.

    `root` is where `proc/` lies. Inside a container numbers are counted anew, so the process that
    has this number here is another one unless, with `holds_gpu`, it has a GPU open.
    """
    folder = root / "proc" / str(pid)
    is_machine = _is_machine(root)
    if not folder.is_dir():
        return Owner(pid=pid, where="unseen" if is_machine else "outside")
    if holds_gpu and not is_machine and _has_gpu_open(folder) is False:
        return Owner(pid=pid, where="outside")
    group = _cgroup(folder)
    unit, is_users = _unit(group)
    container = _CONTAINER.search(group)
    return Owner(
        pid=pid,
        where="here",
        command=_command(folder),
        user=_user(folder),
        unit=unit,
        is_users_unit=is_users,
        container=container[1][:12] if container else "",
    )


def ancestors(pid: int, root: Path = Path("/")) -> Iterator[int]:
    """`pid`, its parent, the parent's parent and so on."""
    seen: set[int] = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        yield pid
        pid = int(_status(root / "proc" / str(pid), "PPid") or 0)


def _is_machine(root: Path) -> bool:
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _INITIAL
    except OSError:
        return False


def _has_gpu_open(folder: Path) -> bool | None:
    """None where this user may not see what the process has open."""
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:
        return None
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()).startswith(_NVIDIA):
                return True
        except OSError:
            continue
    return False


def _cgroup(folder: Path) -> str:
    """Path of its control group: systemd's own hierarchy, or the one there is."""
    for line in _lines(folder / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "name=systemd" or (number == "0" and not controllers and path != "/"):
            return path
    return ""


def _unit(group: str) -> tuple[str, bool]:
    """The service in a group's path, and whether it is of a user's own systemd."""
    services = [part for part in group.split("/") if part.endswith(".service")]
    if not services:
        return "", False
    is_users = services[0].startswith("user@")
    if is_users and len(services) == 1:
        return "", False
    return services[-1], is_users


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    text = " ".join(filter(None, words)) or _status(folder, "Name")
    return text if len(text) <= _COMMAND_LIMIT else f"{text[:_COMMAND_LIMIT]}..."


def _user(folder: Path) -> str:
    numbers = _status(folder, "Uid").split()
    return _user_name(int(numbers[0])) if numbers else ""


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _status(folder: Path, key: str) -> str:
    start = f"{key}:"
    for line in _lines(folder / "status"):
        if line.startswith(start):
            return line.removeprefix(start).strip()
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
