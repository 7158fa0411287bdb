"""Room: every path that a run writes, summed by file system, against what is free there."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.plan_bytes import CORPUS_TOKEN_BYTES, Samples, StoreSizes
from paceline.drafter.memory import checkpoint_bytes, unaveraged_bytes
from paceline.drafter.shape import DrafterShape
from paceline.durable import space, staging
from paceline.durable.open_store import local_path
from paceline.recipe.extract_inputs import is_object_store
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, TrainRecipe

_UNIT_RECORD_BYTES = 500
"""Of a shard, in journal and manifest."""

_SAMPLE_RECORD_BYTES = 60
"""Of a sample in the manifest: id, length, trainable tokens."""

_OTHER_BYTES = 64 << 20
"""Events, logs, the score and the report."""

_BEFORE_TRAINING = ("staging", "corpus", "records")
"""Places that are filled while `extract.high_mark` is watched; checkpoints come later."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A path that a run writes to."""

    what: str
    """`corpus`, `features`, `staging`, `cache`, `checkpoints` or `records`."""
    path: str
    bytes: int
    """Of it in all, at its fullest."""
    there: int
    """Bytes of it that are there already."""
    is_estimate: bool = False

    @property
    def needs(self) -> int:
        """Bytes still to be written."""
        return max(0, self.bytes - self.there)


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Where shards wait for their upload."""

    path: str
    is_memory: bool
    smallest: int
    """The smallest budget that works: what is reserved for the largest shard."""
    smooth: int
    """A budget with which neither a worker nor an upload waits for room."""
    limit: int
    """`extract.staging_bytes`, or half of what is free there now."""


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """A file system, and what the run needs there."""

    point: str
    """Where it is mounted; the path that was asked about, where the system does not tell."""
    device: str
    kind: str
    total: int
    free: int
    spare: int
    """Of `free`, what an extraction leaves to others; 0 where it keeps no features here."""
    below_mark: int | None
    """Bytes until `extract.high_mark`; None where nothing is staged here."""
    needs: int
    needs_below_mark: int
    """Of `needs`, what an extraction has to write below the mark."""
    places: tuple[Place, ...]

    @property
    def room(self) -> int:
        """Bytes that the run may take, whatever the mark says."""
        return self.free - self.spare

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it, below the mark for what the mark watches."""
        return self.needs <= self.room and (
            self.below_mark is None or self.needs_below_mark <= self.below_mark
        )


def staging_of(recipe: Recipe, run_dir: RunDir, sizes: StoreSizes) -> Staging | None:
    """The staging of a run into an object store; None where nothing is staged."""
    if not is_object_store(recipe.extract.store):
        return None
    asked = recipe.extract
    processes = len(recipe.target.devices) or recipe.target.workers

    def needed(given: int | None) -> int:
        return staging.staging_needed(
            given, sizes.largest_shard, workers=processes, uploads=asked.uploads
        )

    folder = staging.choose_staging(asked.staging, run_dir.staging, needed(asked.staging_bytes))
    return Staging(
        path=str(folder),
        is_memory=space.is_tmpfs(folder),
        smallest=sizes.largest_shard,
        smooth=needed(None),
        limit=staging.staging_limit(asked.staging_bytes, folder),
    )


def places_of(
    recipe: Recipe,
    run_dir: RunDir,
    samples: Samples,
    sizes: StoreSizes,
    drafter: DrafterShape,
    staged: Staging | None,
    online: Samples | None = None,
) -> tuple[Place, ...]:
    """Every path that the run writes much to.

    `samples` are those in the store; of `online` ones only the corpus has anything.
    """
    places = [
        Place(
            what="checkpoints",
            path=str(run_dir.checkpoints),
            bytes=_checkpoint_bytes(recipe.train, drafter),
            there=_bytes_in(run_dir.checkpoints),
        ),
        Place(
            what="records",
            path=str(run_dir.root),
            bytes=_OTHER_BYTES
            + sizes.shards * _UNIT_RECORD_BYTES
            + samples.count * _SAMPLE_RECORD_BYTES,
            there=0,
            is_estimate=True,
        ),
    ]
    if online is not None and recipe.train.tee:
        # The codec does as it does in the store.
        share = sizes.total / max(1, samples.tokens)
        places.append(
            Place(
                what="kept features",
                path=str(run_dir.tee),
                bytes=round(share * online.tokens),
                there=_bytes_in(run_dir.tee),
                is_estimate=True,
            )
        )
    if samples.basis != "corpus":
        files = 2 if recipe.regenerate.enabled else 1
        tokens = samples.tokens + (0 if online is None else online.tokens)
        corpus = files * tokens * CORPUS_TOKEN_BYTES
        there = _bytes_in(run_dir.corpus)
        places.append(
            Place(
                what="corpus",
                path=str(run_dir.corpus),
                bytes=corpus,
                there=there,
                is_estimate=True,
            )
        )
    if staged is None:
        folder = local_path(recipe.extract.store) if recipe.extract.store else run_dir.features
        places.append(
            Place(
                what="features",
                path=str(folder),
                bytes=sizes.total,
                there=_bytes_in(folder),
                is_estimate=samples.basis != "corpus" or sizes.codec != "none",
            )
        )
        return tuple(places)
    # Half of what is free, where the recipe does not say how much, is the most and not a need.
    waiting = staged.limit if recipe.extract.staging_bytes else staged.smallest
    places.append(
        Place(what="staging", path=staged.path, bytes=max(waiting, staged.smallest), there=0)
    )
    cache = min(recipe.train.cache_bytes or 2 * sizes.largest_shard, sizes.total)
    places.append(
        Place(
            what="cache",
            path=str(run_dir.shard_cache),
            bytes=cache,
            there=_bytes_in(run_dir.shard_cache),
        )
    )
    return tuple(places)


def _checkpoint_bytes(train: TrainRecipe, drafter: DrafterShape) -> int:
    # The newest, those kept for good, the best, and the one that is being written.
    count = train.keep_checkpoints + _kept_for_good(train) + 2
    return count * checkpoint_bytes(train, drafter) + unaveraged_bytes(train, drafter)


def file_systems(places: Iterable[Place], *, high_mark: float) -> tuple[FileSystem, ...]:
    """The places by the file system that they lie on, with the room there now."""
    groups: dict[tuple[str, str, str], list[Place]] = {}
    for place in places:
        groups.setdefault(_mounted(Path(place.path)), []).append(place)
    return tuple(
        _file_system(mount, members, high_mark) for mount, members in sorted(groups.items())
    )


def _mounted(path: Path) -> tuple[str, str, str]:
    """Mount point, device and kind."""
    try:
        mount = space.mount_of(path)
    except OSError:
        # Without a table of mounts the device number still tells file systems apart.
        number = space.nearest(path).stat().st_dev
        return str(space.nearest(path)), f"device {number}", "unknown"
    return str(mount.point), mount.device, mount.kind


def _file_system(mount: tuple[str, str, str], places: list[Place], high_mark: float) -> FileSystem:
    point, device, kind = mount
    found = space.read_space(Path(places[0].path))
    kinds = {place.what for place in places}
    watched = "staging" in kinds
    room = int(high_mark * (found.used + found.free)) - found.used
    before = sum(p.needs for p in places if p.what in _BEFORE_TRAINING)
    return FileSystem(
        point=point,
        device=device,
        kind=kind,
        total=found.total,
        free=found.free,
        spare=min(found.spare, found.free) if "features" in kinds else 0,
        below_mark=max(0, room) if watched else None,
        needs=sum(place.needs for place in places),
        needs_below_mark=before if watched else 0,
        places=tuple(places),
    )


def mark_for(file_system: FileSystem, high_mark: float) -> float | None:
    """The lowest mark, in hundredths, below which there is room; None where none is above."""
    if file_system.below_mark is None or file_system.needs > file_system.room:
        return None
    found = space.read_space(Path(file_system.places[0].path))
    usable = found.used + found.free
    mark = -(-100 * (found.used + file_system.needs_below_mark) // usable) / 100
    return mark if high_mark < mark <= 1 else None


def _kept_for_good(train: TrainRecipe) -> int:
    return train.evaluations // train.keep_every if train.keep_every else 0


def _bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder and in the folders in it; 0 where there is none."""
    total = 0
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                total += sum(_size(inner) for inner in os.scandir(entry))
            else:
                total += _size(entry)
    except OSError:
        return total
    return total


def _size(entry: os.DirEntry) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
