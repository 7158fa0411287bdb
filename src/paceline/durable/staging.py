"""Staging: where shards wait for their upload, one folder a run, and what dead runs left there."""

import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.durable.checksum import crc64_file
from paceline.durable.errors import UserError
from paceline.durable.fs import (
    PARTIAL,
    REAL_FS,
    FileSystem,
    remove_dead_partials,
    write_atomic,
)
from paceline.durable.iowatch import IoWatch
from paceline.durable.owner import LOCK, holder, owned
from paceline.durable.run_id import claim_run_id, read_run_id
from paceline.durable.space import is_tmpfs, mount_of, read_space
from paceline.durable.store import Stat, check_key

WORDS = "staging.json"
"""Whose a staging folder is."""

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "paceline-"
_UNITS = "units"
_SHARE_OF_FREE = 0.5
"""Of what is free at the start; others use the rest."""


@dataclass(frozen=True)
class Whose:
    """What `staging.json` says."""

    run_root: str
    host: str
    boot_id: str
    """Of the machine, as it was started then; empty where the system does not tell."""

    run_id: str = ""
    """See `run_id`: another run may stand at that path by now, or in another container."""

    lies_in: str = ""
    """Device and inode of the folder that `run_root` lies in; empty where it is mounted there, or
    where that is not known. In another container the same path is another folder."""


@dataclass(frozen=True)
class Leftover:
    """A staging folder of some run."""

    path: Path

    run_root: Path | None
    """Its run directory; None where the folder does not say."""

    bytes: int

    is_live: bool
    """Whether a process holds it."""

    is_orphan: bool
    """Whether its run directory was here and is gone, or another run stands in its place."""


@dataclass(frozen=True)
class Recovered:
    """What was found in one's own staging folder."""

    kept: dict[str, Stat]
    """Whole units that the journal knows as staged, by key."""

    removed: dict[str, str]
    """What proved nothing, by name, with the reason."""


class Staging:
    """`<folder>/paceline-<run id>/`, held for as long as this object is open.

    The name follows from the path of the run directory and the id in it, so the run finds its own
    folder again, whatever the machine is called and however often it was started, and two
    containers that have equal paths and one `/dev/shm` do not meet. Calls that only read are known
    to `watch`. Raises UserError where another process holds it, OSError where it cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        run_root: Path,
        *,
        fs: FileSystem = REAL_FS,
        watch: IoWatch | None = None,
    ) -> None:
        run_id = claim_run_id(run_root, fs=fs)
        self.root = staging_root(folder, run_root)
        self._units = self.root / _UNITS
        self._fs = fs
        self._watch = watch or IoWatch()
        self._held = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(owned(self.root, f"staging of {run_root}", fs=fs))
            # Of a start that was killed here: a folder that holds one is never empty again.
            remove_dead_partials(self.root, fs=fs)
            whose = Whose(
                run_root=str(run_root.absolute()),
                host=socket.gethostname(),
                boot_id=boot_id(),
                run_id=run_id,
                lies_in=_folder_of(run_root),
            )
            write_atomic(self.root / WORDS, msgspec.json.encode(whose), fs=fs)
            fs.make_dirs(self._units)
            self._held = stack.pop_all()

    def path(self, key: str) -> Path:
        """Where a unit waits. Raises ValueError for a bad key."""
        check_key(key)
        return self._units / key

    def discard(self, key: str) -> None:
        """Remove a unit, whole or half-written; absent is fine."""
        path = self.path(key)
        for partial in sorted(path.parent.glob(f"{path.name}.*{PARTIAL}")):
            self._fs.unlink(partial)
        self._fs.unlink(path)

    def recover(self, staged: Mapping[str, Stat]) -> Recovered:
        """Keep what `staged` promises and the bytes confirm; remove everything else here.

        Reads every file that is promised. Nobody else writes here: this process has the lock.
        """
        kept: dict[str, Stat] = {}
        removed: dict[str, str] = {}
        with self._watch.call("list", self._units):
            found = sorted(p for p in self._units.rglob("*") if p.is_file() or p.is_symlink())
        for path in found:
            key = path.relative_to(self._units).as_posix()
            reason = self._reason(path, key, staged.get(key))
            if reason is None:
                kept[key] = staged[key]
            else:
                self._fs.unlink(path)
                removed[key] = reason
        return Recovered(kept, removed)

    def close(self) -> None:
        """Let go; an empty folder is removed."""
        with suppress(OSError):
            for folder in sorted((p for p in self._units.rglob("*")), reverse=True):
                folder.rmdir()
            self._units.rmdir()
            # Only who holds the lock gets here, and the run itself is locked against a second.
            self._fs.unlink(self.root / WORDS)
            self._fs.unlink(self.root / LOCK)
            self.root.rmdir()
        self._held.close()

    def _reason(self, path: Path, key: str, wanted: Stat | None) -> str | None:
        """Why a file proves nothing; None where it is what the journal says."""
        with self._watch.call("look at", path):
            size = None if path.is_symlink() else path.stat().st_size
        if size is None:
            return "a link"
        if key.endswith(PARTIAL):
            return "half-written"
        if wanted is None:
            return "not recorded as waiting"
        if size != wanted.size:
            return f"{size} bytes, not the recorded {wanted.size}"
        crc64 = crc64_file(path, around=lambda: self._watch.call("read", path))
        return None if crc64 == wanted.crc64 else "its checksum does not hold"


def staging_root(folder: Path, run_root: Path) -> Path:
    """The staging folder of a run, whether it exists or not; nobody's before the run has an id.

    Raises OSError where it cannot be seen whether it has one.
    """
    words = os.fsencode(run_root.resolve()) + b"\0" + read_run_id(run_root).encode()
    return folder / f"{_PREFIX}{hashlib.sha256(words).hexdigest()[:12]}"


def staged_bytes(folder: Path, run_root: Path) -> tuple[Path, int]:
    """The staging folder of a run in `folder`, and the bytes of shards in it, half-written or not.

    Raises OSError as `staging_root`.
    """
    root = staging_root(folder, run_root)
    return root, _bytes_below(root / _UNITS)


def staging_needed(given: int | None, largest: int, *, workers: int, uploads: int) -> int:
    """Bytes that shared memory has to have room for: those of `extract.staging_bytes`, if any.

    Else as many as let nobody wait, of shards of at most `largest` bytes: of each worker one in
    work and one that waits for its upload, and one of each upload.
    """
    return given or (2 * workers + uploads) * largest


def choose_staging(
    setting: str, run_staging: Path, needed_bytes: int, *, shared: Path = SHARED_MEMORY
) -> Path:
    """The folder that `extract.staging` means.

    `auto` is shared memory where that is a tmpfs and half of what is free there holds
    `needed_bytes`, else `run_staging`; all else is a path.
    """
    if setting != "auto":
        return Path(setting)
    if not (shared.is_dir() and os.access(shared, os.W_OK) and is_tmpfs(shared)):
        return run_staging
    return shared if read_space(shared).free * _SHARE_OF_FREE >= needed_bytes else run_staging


def staging_limit(setting: int | None, folder: Path) -> int:
    """Bytes that `extract.staging_bytes` means: null is half of what is free in `folder` now."""
    return setting or max(1, int(read_space(folder).free * _SHARE_OF_FREE))


def open_stagings(
    folder: Path,
    run_staging: Path,
    run_root: Path,
    *,
    fs: FileSystem = REAL_FS,
    watch: IoWatch | None = None,
    shared: Path = SHARED_MEMORY,
) -> tuple[Staging, Staging | None]:
    """Hold the chosen staging folder, and one to fall back on.

    That is the run directory's, or, where that was chosen, the one in shared memory if an
    earlier start of this run left it: what waits there is uploaded too.
    """
    if any(_is_of_the_original(staging_root(f, run_root), run_root) for f in (folder, run_staging)):
        claim_run_id(run_root, anew=True, fs=fs)
    first = Staging(folder, run_root, fs=fs, watch=watch)
    other = run_staging
    if staging_root(run_staging, run_root) == first.root:
        if not staging_root(shared, run_root).is_dir():
            return first, None
        other = shared
    try:
        return first, Staging(other, run_root, fs=fs, watch=watch)
    except OSError:
        return first, None
    except BaseException:
        first.close()
        raise


def leftovers(folder: Path) -> list[Leftover]:
    """The staging folders of all runs in `folder`; changes nothing."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        if not path.is_dir():
            continue
        whose = _whose(path)
        root = None if whose is None else Path(whose.run_root)
        is_orphan = whose is not None and _is_gone(whose)
        found.append(Leftover(path, root, _bytes_below(path), _is_live(path), is_orphan))
    return found


def clear_leftovers(folder: Path, run_root: Path) -> tuple[list[Leftover], list[Leftover]]:
    """Remove what dead runs left in `folder` whose run directory is gone.

    Returns what was removed, and the other dead runs' folders, which may be gone on with; the
    run at `run_root` and live ones are in neither.
    """
    own = staging_root(folder, run_root)
    removed, named = [], []
    for left in leftovers(folder):
        if left.path == own or left.is_live:
            continue
        if left.is_orphan:
            shutil.rmtree(left.path, ignore_errors=True)
        (named if left.path.exists() else removed).append(left)
    return removed, named


def boot_id() -> str:
    """The id of the machine's last start; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _whose(path: Path) -> Whose | None:
    try:
        return msgspec.json.decode((path / WORDS).read_bytes(), type=Whose)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def _is_gone(whose: Whose) -> bool:
    """Whether the folder that the run lay in is here, and the run is not in it any more."""
    root = Path(whose.run_root)
    try:
        is_here = whose.host == socket.gethostname() and whose.lies_in == _folder_of(root)
        return is_here and bool(whose.lies_in) and read_run_id(root) != whose.run_id
    except OSError:
        return False  # not to be seen is not gone


def _is_of_the_original(path: Path, run_root: Path) -> bool:
    """Whether the run at `run_root` is a copy that has kept the path and id of its original.

    As in another container, into which it was copied. Devices have the same numbers until the
    machine is started again.
    """
    whose = _whose(path)
    if whose is None or whose.boot_id != boot_id():
        return False
    return "" not in (whose.boot_id, whose.lies_in) and whose.lies_in != _folder_of(run_root)


def _folder_of(run_root: Path) -> str:
    """`Whose.lies_in`. Raises OSError where that folder cannot be seen."""
    root = Path(os.path.realpath(run_root))
    try:
        if mount_of(root).point == root:
            return ""
    except OSError:
        return ""
    found = root.parent.stat()
    return f"{found.st_dev}:{found.st_ino}"


def _is_live(path: Path) -> bool:
    try:
        return holder(path) is not None
    except UserError:
        return True  # held, and the words are missing
    except OSError:
        return True  # another user's: not ours to judge


def _bytes_below(path: Path) -> int:
    total = 0
    for found in path.rglob("*"):
        with suppress(OSError):
            total += found.stat(follow_symlinks=False).st_blocks * 512
    return total
