"""What of a run may be removed: only what its own papers list, as they list it."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.durable.errors import DataError, IntegrityError, PacelineError, UserError
from paceline.durable.fs import PARTIAL
from paceline.durable.journal import salvage
from paceline.durable.owner import LOCK, holder
from paceline.durable.processes import is_writer
from paceline.durable.staging import WORDS, staging_root
from paceline.durable.store import Store
from paceline.extract import sharing
from paceline.extract.layout import JOURNAL
from paceline.extract.ledger import UNIT_PREFIX
from paceline.features import manifest as manifests
from paceline.features.plan import tee_key
from paceline.recipe.checkpoints import EVALUATION, SUMS, list_checkpoints, rank
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from paceline.types.row_index import FILE_NAME as INDEX

Kind = Literal["partial", "copy", "staged", "checkpoint", "kept", "shard", "paper"]

_OURS = re.compile(rf"\.(\d+)\{PARTIAL}$|^step_\d+\{PARTIAL}$")
_CHECKPOINT = re.compile(r"step_\d+")
_ASIDE = re.compile(r"step_\d+(\.\d+)?\.aside")
_FETCH = re.compile(r"\.\d+\.fetch$")


@dataclass(frozen=True)
class Item:
    """Something to remove."""

    kind: Kind
    name: str
    """For people, below the run directory where it lies there."""

    bytes: int
    paths: tuple[Path, ...] = ()
    """Files to remove, in this order; none of an object in a store."""

    folder: Path | None = None
    """Removed behind its files."""

    key: str = ""
    """Of an object in the store."""


@dataclass
class Finds:
    """What was found: what would go, and what stays, with the reason."""

    items: list[Item] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def leave(self, name: str, why: str) -> None:
        """Name something that is not removed."""
        self.left.append(f"{name}: {why}")


@dataclass(frozen=True)
class Listed:
    """The objects that the papers of an extraction list."""

    sizes: Mapping[str, frozenset[int]]
    """Key to every size that was recorded or published for it."""

    verified: frozenset[str]
    """Keys that were verified in the store."""


def read_listed(features: Path) -> Listed:
    """Fold journal and manifest, as far as they can be read, whatever extraction they are of."""
    sizes: dict[str, set[int]] = {}
    verified: set[str] = set()
    with suppress(FileNotFoundError):
        for record in salvage((features / JOURNAL).read_bytes()):
            if record.get("kind") in ("staged", "verified"):
                sizes.setdefault(record["key"], set()).add(record["size"])
                if record["kind"] == "verified":
                    verified.add(record["key"])
    with suppress(DataError, IntegrityError):
        for unit in manifests.load(features).units:
            sizes.setdefault(unit.key, set()).add(unit.size)
            verified.add(unit.key)
    return Listed({key: frozenset(found) for key, found in sizes.items()}, frozenset(verified))


def find_partials(root: Path, finds: Finds) -> None:
    """Files and checkpoints that dead processes left half-written or half-removed."""
    # A run's folders may be links to other disks; links further down are somebody else's.
    links = [path for path in sorted(root.iterdir()) if path.is_symlink() and path.is_dir()]
    for start in (root, *links):
        for top, folders, files in os.walk(start):
            for name in sorted([*folders, *files]):
                match = _OURS.search(name)
                if match is None:
                    continue
                if name in folders:
                    folders.remove(name)
                _find_partial(root, Path(top) / name, match[1], finds)


def _find_partial(root: Path, path: Path, pid: str | None, finds: Finds) -> None:
    name = _short(path, root)
    if pid is not None and is_writer(int(pid), path):
        finds.leave(name, f"process {pid} is writing it")
        return
    if path.is_symlink() or not path.is_dir():
        finds.items.append(Item("partial", name, _size((path,)), (path,)))
        return
    paths = tuple(p for p in sorted(path.rglob("*")) if p.is_symlink() or not p.is_dir())
    finds.items.append(Item("partial", name, _size(paths), paths, path))


def find_copies(root: Path, cache: Path, listed: Listed, finds: Finds) -> None:
    """Local copies of the store's shards."""
    for path in sorted(p for p in cache.rglob("*") if not p.is_dir() or p.is_symlink()):
        key = _FETCH.sub("", path.name)
        if path.name == "cache.lock" and path.parent == cache:
            finds.items.append(Item("copy", _short(path, root), 0, (path,)))
        elif key in listed.sizes and not path.is_symlink():
            finds.items.append(Item("copy", _short(path, root), _size((path,)), (path,)))
        elif not path.name.endswith(PARTIAL):
            finds.leave(_short(path, root), "no copy of a shard that this run lists")


def find_staged(
    root: Path, folders: Mapping[Path, None], listed: Listed, finds: Finds, *, all_of_it: bool
) -> None:
    """Shards of this run that wait in `folders`; those not in the store only with `all_of_it`."""
    for folder in folders:
        own = staging_root(folder, root)
        if not own.is_dir():
            continue
        if _is_held(own):
            finds.leave(str(own), "a process holds it")
            continue
        paths = sorted(p for p in own.rglob("*") if p.is_symlink() or not p.is_dir())
        kept = 0
        for path in paths:
            if path.name in (WORDS, LOCK) or path.name.endswith(PARTIAL):
                continue
            if path.name not in listed.sizes:
                finds.leave(str(path), "not listed by this run")
            elif path.name not in listed.verified and not all_of_it:
                finds.leave(str(path), "waits for its upload; `paceline extract` sends it")
            else:
                finds.items.append(Item("staged", str(path), _size((path,)), (path,)))
                continue
            kept += 1
        if not kept:
            last = tuple(p for p in paths if p.name in (WORDS, LOCK) or p.name.endswith(PARTIAL))
            finds.items.append(Item("staged", str(own), _size(last), last, own))


def find_checkpoints(run_dir: RunDir, keep: int, finds: Finds) -> None:
    """Checkpoints other than the newest `keep`, the best, and what the training's record lists."""
    folder = run_dir.checkpoints
    found = list_checkpoints(folder)
    readable = [c for c in found if c.step >= 0]
    kept = {c.name for c in readable[-keep:]}
    kept |= _recorded(folder)
    best = max(readable, key=lambda c: rank(folder / c.name, c.tau), default=None)
    kept |= set() if best is None else {best.name}
    names = sorted(p.name for p in folder.glob("step_*") if p.is_dir() and not p.is_symlink())
    for name in names:
        if name in kept or not (_CHECKPOINT.fullmatch(name) or _ASIDE.fullmatch(name)):
            continue
        path = folder / name
        files = _checkpoint_files(path)
        there = sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))
        if files is None:
            finds.leave(_short(path, run_dir.root), f"its {SUMS} cannot be read")
        elif foreign := [name for name in there if name not in files]:
            finds.leave(_short(path, run_dir.root), f"holds what is not of it: {foreign[0]}")
        else:
            # Its list goes last: until then it can be gone on with.
            paths = (*(path / name for name in there if name != SUMS), path / SUMS)
            name = _short(path, run_dir.root)
            finds.items.append(Item("checkpoint", name, _size(paths), paths, path))


def find_shards(store: Store, listed: Listed, finds: Finds) -> None:
    """The shards that are as the papers list them."""
    for found in store.list(UNIT_PREFIX):
        sizes = listed.sizes.get(found.key)
        if sizes is None:
            finds.leave(found.key, "listed by neither journal nor manifest")
        elif found.size not in sizes:
            finds.leave(found.key, f"{found.size:,} bytes, not as listed")
        else:
            finds.items.append(Item("shard", found.key, found.size, key=found.key))


def find_words(store: Store, features: Path, finds: Finds) -> None:
    """What stands beside the shards in a store elsewhere: word of the code, and the manifest."""
    for name in (sharing.KEY, manifests.FILE_NAME):
        for found in store.list(name):
            if found.key != name:
                continue
            try:
                is_ours = name == sharing.KEY or (
                    store.get_range(name, 0, found.size) == (features / name).read_bytes()
                )
            except OSError:
                is_ours = False
            if is_ours:
                finds.items.append(Item("paper", f"{store.url}/{name}", found.size, key=name))
            else:
                finds.leave(f"{store.url}/{name}", "not the manifest of this run")


def find_tee(tee: Path, root: Path, finds: Finds) -> None:
    """What an online training has captured and kept: the shards that its journal lists."""
    journal = tee / JOURNAL
    if not journal.is_file():
        return
    listed = {
        tee_key(record["index"])
        for record in salvage(journal.read_bytes())
        if record.get("kind") == "kept"
    }
    shards = []
    for path in sorted(tee.glob("*")):
        if path.name in listed and path.is_file() and not path.is_symlink():
            shards.append(path)
        elif path != journal and not path.name.endswith(PARTIAL):
            finds.leave(_short(path, root), "not listed")
    # Its list goes last: until then it can be gone on with.
    paths = (*shards, journal)
    finds.items.append(Item("kept", _short(tee, root), _size(paths), paths))


def find_papers(features: Path, root: Path, finds: Finds) -> None:
    """What lists the shards; the journal last."""
    for name in (INDEX, manifests.FILE_NAME, JOURNAL):
        path = features / name
        if path.is_file():
            finds.items.append(Item("paper", _short(path, root), _size((path,)), (path,)))
    known = {INDEX, manifests.FILE_NAME, JOURNAL, "extract.stage.json"}
    for path in sorted(features.glob("*")):
        ours = path.name in known or path.name.startswith(UNIT_PREFIX)
        if not ours and not path.name.endswith(PARTIAL):
            finds.leave(_short(path, root), "not listed")


def require_trained(run_dir: RunDir) -> None:
    """Raise UserError unless the training, which reads the features, has come to its end."""
    record = read_record(run_dir.checkpoints, "train")
    if record is None or record.outputs is None:
        raise UserError(
            f"{run_dir.root}: the training has not come to its end, and it reads the features. "
            "Let it end first, or add `--force`."
        )


def _recorded(folder: Path) -> set[str]:
    """Checkpoints that the finished training names. Raises IntegrityError for a damaged record."""
    record = read_record(folder, "train")
    if record is None:
        return set()
    names = {Path(output).parts[0] for output in record.outputs or {}}
    return names | {str(record.report.get("best"))}


def _checkpoint_files(folder: Path) -> set[str] | None:
    """The files that a checkpoint lists as its own."""
    try:
        sums: dict[str, Any] = msgspec.json.decode((folder / SUMS).read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError):
        return None
    return {*sums, SUMS, EVALUATION}


def _is_held(folder: Path) -> bool:
    try:
        return holder(folder) is not None
    except (PacelineError, OSError):
        return True


def _size(paths: tuple[Path, ...]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def _short(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
