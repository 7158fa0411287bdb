"""Removing what a run no longer needs: a plan first, then the deed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.errors import PacelineError, UserError
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.staging import SHARED_MEMORY
from paceline.durable.store import Store
from paceline.extract.cleanable import (
    Finds,
    Item,
    find_checkpoints,
    find_copies,
    find_papers,
    find_partials,
    find_shards,
    find_staged,
    find_tee,
    find_words,
    read_listed,
    require_trained,
)
from paceline.extract.destination import destination
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import Record, mark_cleaned, read_record

_BATCH = 500
"""Objects that are removed with one call."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for beyond leftovers and copies."""

    features: bool = False
    """The shards and their papers, once they are trained on."""

    checkpoints: bool = False
    keep: int = 2
    """Newest checkpoints that stay beside the best."""

    force: bool = False
    """Features that are not trained on, and shards that wait for their upload."""


@dataclass(frozen=True)
class CleanPlan:
    """What would be removed, in this order, and what stays though it lies there."""

    items: tuple[Item, ...]
    left: tuple[str, ...]
    """Sentences."""

    store: Store | None
    """Where the shards are."""

    marks: bool
    """Whether the extraction's record is told that its shards go."""

    @property
    def bytes(self) -> int:
        """Of all items."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class Cleaned:
    """What was done."""

    removed: int
    bytes: int
    failed: tuple[str, ...]
    """What could not be removed, and why."""


def plan_clean(
    run_dir: RunDir, wanted: Wanted, *, shared_memory: Path = SHARED_MEMORY
) -> CleanPlan:
    """Look what could go; changes nothing.

    The run is held by the caller, or nobody. Raises UserError where the features are to go that a
    training still needs, and for `keep` below 1; what the recipe and the store are refused for.
    """
    if wanted.keep < 1:
        raise UserError(f"--keep {wanted.keep}: at least the newest checkpoint stays.")
    if wanted.features and not wanted.force:
        require_trained(run_dir)
    recipe = load_recipe(run_dir.recipe)
    record = read_record(run_dir.features, "extract")
    listed = read_listed(run_dir.features)
    finds = Finds()
    find_partials(run_dir.root, finds)
    find_copies(run_dir.root, run_dir.shard_cache, listed, finds)
    places = [run_dir.staging, shared_memory]
    if recipe.extract.staging != "auto":
        places.append(Path(recipe.extract.staging))
    is_needless = _is_over(record) or (wanted.features and wanted.force)
    find_staged(run_dir.root, dict.fromkeys(places), listed, finds, all_of_it=is_needless)
    if wanted.checkpoints:
        find_checkpoints(run_dir, wanted.keep, finds)
    if wanted.features:
        find_tee(run_dir.tee, run_dir.root, finds)
    store = None
    if wanted.features and record is not None:
        to = destination(recipe.extract, run_dir, record.fingerprint)
        store = to.store
        find_shards(store, listed, finds)
        if not to.is_own:
            find_words(store, run_dir.features, finds)
        find_papers(run_dir.features, run_dir.root, finds)
    return CleanPlan(tuple(finds.items), tuple(finds.left), store, wanted.features)


def carry_out(plan: CleanPlan, run_dir: RunDir, *, fs: FileSystem = REAL_FS) -> Cleaned:
    """Remove what the plan names; the caller holds the run.

    Killed half-way, the same call goes on: the papers that list the shards go last, the journal
    behind all others, and neither while a shard could not be removed.
    """
    shards = [item for item in plan.items if item.kind == "shard"]
    papers = [item for item in plan.items if item.kind == "paper"]
    others = [item for item in plan.items if item.kind not in ("shard", "paper")]
    work = _Work(fs, plan.store)
    for item in others:
        work.remove(item)
    if plan.marks:
        # Before the first shard goes: a record must not promise what is being removed.
        mark_cleaned(run_dir.features, "extract")
    if work.delete(shards):
        for item in papers:
            work.remove(item)
    elif papers:
        work.failed.append("manifest and journal stay: they list what could not be removed.")
    for folder in (run_dir.shard_cache, run_dir.staging, run_dir.tee):
        _remove_empty(folder)
    return Cleaned(len(work.done), sum(item.bytes for item in work.done), tuple(work.failed))


class _Work:
    """Removes, and keeps count."""

    def __init__(self, fs: FileSystem, store: Store | None) -> None:
        self._fs, self._store = fs, store
        self.done: list[Item] = []
        self.failed: list[str] = []

    def remove(self, item: Item) -> None:
        """Files, then their folder with the empty ones in it."""
        try:
            if item.key and self._store is not None:
                self._store.delete([item.key])
            for path in item.paths:
                self._fs.unlink(path)
            if item.folder is not None:
                _remove_empty(item.folder)
                if item.folder.exists():
                    self.failed.append(f"{item.name}: holds something else now; left.")
                    return
        except (OSError, PacelineError) as error:
            self.failed.append(f"{item.name}: {error}")
            return
        self.done.append(item)

    def delete(self, items: Sequence[Item]) -> bool:
        """Objects of the store; whether all of them are gone."""
        is_clean = True
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            try:
                if self._store is not None:
                    self._store.delete([item.key for item in batch])
            except (OSError, PacelineError) as error:
                self.failed.append(f"{batch[0].name} to {batch[-1].name}: {error}")
                is_clean = False
                continue
            self.done += batch
        return is_clean


def _is_over(record: Record | None) -> bool:
    """Whether an extraction has come to its end: what waits for an upload is a leftover then."""
    return record is not None and record.outputs is not None


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those in it, as far as they are empty."""
    inside = [p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()]
    for path in [*sorted(inside, reverse=True), folder]:
        with suppress(OSError):
            path.rmdir()
