"""systemd services that start at boot and will take a GPU, whether they run now or not."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Runner = Callable[[Sequence[str]], str | None]
"""Runs a command; what it printed, None where it failed or there is none."""

_SERVERS = (
    "vllm",
    "sglang",
    "ollama",
    "tritonserver",
    "text-generation",
    "llama-server",
    "lmdeploy",
    "trtllm-serve",
    "comfyui",
)
_SERVER = re.compile(rf"(?<![\w])({'|'.join(map(re.escape, _SERVERS))})", re.IGNORECASE)
_GPU = re.compile(r"cuda|nvidia|--gpus\b", re.IGNORECASE)
_DRIVERS_OWN = re.compile(r"(nvidia-|nv-|dcgm)", re.IGNORECASE)
"""Services of the driver itself: they manage GPUs and hold none of their memory."""

_FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system",
            "lib/systemd/system")  # fmt: skip
_USER_FOLDERS = ("etc/systemd/user", "usr/lib/systemd/user")
_SECONDS = 5.0
_LIST = ("systemctl", "list-unit-files", "--state=enabled", "--type=service", "--no-legend",
         "--plain", "--no-pager")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A service that is started at boot."""

    name: str
    """Such as `vllm.service`."""
    why: str
    """What makes it one that takes a GPU: a server's name, or the line that mentions one."""
    is_users: bool = False
    """Whether a user's own systemd starts it."""
    is_running: bool | None = None
    """None where that is not known."""
    run_dir: Path | None = None
    """Of a service that is a run of Paceline, as it names it (docs/paceline@.service)."""

    def mend(self) -> str:
        """Stops it, and keeps it stopped after the next boot."""
        if self.is_users:
            return f"systemctl --user disable --now {self.name}"
        return f"sudo systemctl disable --now {self.name}"


def run_here(command: Sequence[str]) -> str | None:
    """A `Runner` of this machine."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        ended = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # `is-active` says so by its exit code as well, and its answer is what counts.
    return ended.stdout if ended.returncode == 0 or command[1] == "is-active" else None


def gpu_units(root: Path, home: Path | None, run: Runner = run_here) -> list[Unit] | None:
    """Services enabled at boot that name an inference server or a GPU; None without systemd.

    Args:
        root: where `etc/` and `run/` lie.
        home: the user's folder, for the units of their own; None leaves those out.
        run: asks `systemctl`, where systemd runs; else the folders' links are read.

    """
    if not any((root / folder).is_dir() for folder in _FOLDERS):
        return None
    found: dict[tuple[bool, str], Unit] = {}
    is_booted = (root / "run/systemd/system").is_dir()
    listed = _listed(run(_LIST)) if is_booted else None
    system = [root / folder for folder in _FOLDERS]
    for name in listed if listed is not None else _linked(system):
        text = _text(name, system, root)
        why = _reason(name, text)
        if why:
            active = run(("systemctl", "is-active", name)) if is_booted else None
            running = None if active is None else active.strip() == "active"
            own = _run_dir(name, text)
            found[False, name] = Unit(name=name, why=why, is_running=running, run_dir=own)
    users = [root / folder for folder in _USER_FOLDERS]
    if home is not None:
        users.insert(0, home / ".config/systemd/user")
    for name in _linked(users):
        text = _text(name, users, root)
        why = _reason(name, text)
        if why:
            own = _run_dir(name, text)
            found[True, name] = Unit(name=name, why=why, is_users=True, run_dir=own)
    return [found[key] for key in sorted(found)]


def _listed(output: str | None) -> list[str] | None:
    """Names in the answer of `systemctl list-unit-files`."""
    if output is None:
        return None
    return [line.split()[0] for line in output.splitlines() if line.strip()]


def _linked(folders: Sequence[Path]) -> Iterator[str]:
    """Names of services that a target wants or requires: what `systemctl enable` makes."""
    names: dict[str, None] = {}
    for folder in folders:
        for kind in ("wants", "requires"):
            for link in sorted(folder.glob(f"*.{kind}/*.service")):
                names[link.name] = None
    yield from names


def _text(name: str, folders: Sequence[Path], root: Path) -> str:
    """The unit's file with its additions; empty where it cannot be read."""
    # Of an instance `vllm@0.service` the file is that of its template.
    names = (name, re.sub(r"@.*\.service$", "@.service", name))
    parts: list[str] = []
    for each in dict.fromkeys(names):
        file = next((f / each for f in folders if (f / each).exists() or (f / each).is_symlink()),
                    None)  # fmt: skip
        if file is not None:
            parts.append(_read(_resolved(file, root)))
            break
    else:
        for folder in folders:
            links = [*folder.glob(f"*.wants/{name}"), *folder.glob(f"*.requires/{name}")]
            parts += [_read(_resolved(link, root)) for link in links[:1]]
    for folder in folders:
        for each in dict.fromkeys(names):
            parts += [_read(file) for file in sorted((folder / f"{each}.d").glob("*.conf"))]
    return "\n".join(parts)


def _resolved(file: Path, root: Path) -> Path:
    """Where a link points, an absolute one taken as below `root`."""
    if not file.is_symlink():
        return file
    target = file.readlink()
    return root / target.relative_to("/") if target.is_absolute() else file.parent / target


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _run_dir(name: str, text: str) -> Path | None:
    """The run directory of the last `ExecStart=... paceline run ... --run DIR`, `%i` replaced."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^ExecStart=\S*paceline run .*--run[ =](\S+)", joined, re.MULTILINE)
    instance = name.removesuffix(".service").partition("@")[2]
    return Path(found[-1].replace("%i", instance)) if found else None


def _reason(name: str, text: str) -> str:
    """Why this service takes a GPU; empty where nothing says so."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", ";", "["))]
    starts = [line for line in lines if line.startswith("Exec")]
    for line in (name, *starts):
        server = _SERVER.search(line)
        if server:
            return f"starts {server[1].lower()}"
    if _DRIVERS_OWN.match(name):
        return ""
    words = ("Description=", "Documentation=")
    line = next((e for e in lines if _GPU.search(e) and not e.startswith(words)), None)
    return "" if line is None else f"says `{line[:80]}`"
