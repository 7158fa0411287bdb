"""Where the shards of an extraction go, and what stands between a worker and that place."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.budget import Budget, check_budget
from paceline.durable.depot import Depot
from paceline.durable.fs import REAL_FS, remove_dead_partials
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.local_depot import LocalDepot
from paceline.durable.open_store import is_local, local_path, open_store
from paceline.durable.space import Space, read_space
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import (
    choose_staging,
    clear_leftovers,
    open_stagings,
    staging_limit,
)
from paceline.durable.store import LocalStore, Store
from paceline.durable.uploader import Uploader
from paceline.flow.waker import Waker
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe
from paceline.watch.words import counted, short_bytes

_LOG = logging.getLogger(__name__)

_DEEP_BYTES = 4 << 30
"""A few seconds of reading."""


@dataclass(frozen=True)
class Destination:
    """The store of one extraction."""

    store: Store

    is_own: bool
    """Whether it is the run's own `features/`: then no other machine works there."""

    @property
    def url(self) -> str:
        """For the manifest: empty for the manifest's own folder."""
        return "" if self.is_own else self.store.url

    @property
    def deep_bytes(self) -> int:
        """How much is read at every start, to find what a disk has lost or turned since."""
        return _DEEP_BYTES if isinstance(self.store, LocalStore) else 0

    @property
    def folder(self) -> Path | None:
        """Where shards are written at once; None where they are uploaded."""
        return self.store.path("unit").parent if isinstance(self.store, LocalStore) else None


def destination(recipe: ExtractRecipe, run_dir: RunDir, fingerprint: str) -> Destination:
    """The store that the recipe names, below it a folder of this very extraction.

    So what another recipe makes never has the right name. Raises UserError as `open_store`.
    """
    if not recipe.store:
        return Destination(LocalStore(run_dir.features), is_own=True)
    if is_local(recipe.store):
        return Destination(LocalStore(local_path(recipe.store) / fingerprint), is_own=False)
    url = f"{recipe.store.rstrip('/')}/{fingerprint}"
    return Destination(open_store(url, recipe.store_options), is_own=False)


@contextmanager
def open_depot(
    to: Destination,
    recipe: ExtractRecipe,
    run_dir: RunDir,
    journal: Journal,
    fingerprint: str,
    *,
    samples: Callable[[str], int],
    bounds: Sequence[int],
    workers: int,
    watch: IoWatch,
    waker: Waker,
) -> Iterator[tuple[Depot, Path]]:
    """What keeps made units, and the folder that workers write to.

    `samples` gives a unit's number of samples, `bounds` are the most bytes that each unit may
    take. Raises RecipeError for a staging budget below the largest of them.
    """
    fs = WatchedFs(REAL_FS, watch)

    def read(path: Path) -> Space:
        with watch.call("look for room", path):
            return read_space(path)

    high, low, space_wait = recipe.high_mark, recipe.low_mark, recipe.space_wait
    with ExitStack() as stack:
        if isinstance(to.store, LocalStore):
            folder = to.store.path("unit").parent
            fs.make_dirs(folder)
            if not to.is_own:
                # The run's own folder is cleared when its record is opened.
                left = remove_dead_partials(folder, is_shared=True, fs=fs)
                if left:
                    words = counted(len(left), "unfinished file")
                    _LOG.info("extract: removed %s of a killed run from %s", words, folder)
            yield (
                LocalDepot(
                    to.store,
                    journal,
                    fingerprint,
                    samples=samples,
                    high=high,
                    low=low,
                    space_wait=space_wait,
                    fs=fs,
                    read=read,
                ),
                folder,
            )
            return
        largest = max(bounds, default=1)
        wanted = recipe.staging_bytes or (2 * workers + recipe.uploads) * largest
        place = choose_staging(recipe.staging, run_dir.staging, wanted)
        for folder in {place, run_dir.staging}:
            _clear(folder, run_dir.root)
        staging, fallback = open_stagings(place, run_dir.staging, run_dir.root, fs=fs)
        stack.callback(staging.close)
        if fallback is not None:
            stack.callback(fallback.close)
        # A disk that is full right now is waited for; only a budget that was given is refused.
        limit = recipe.staging_bytes or max(largest, staging_limit(None, place))
        check_budget(limit, bounds)
        uploader = Uploader(
            to.store, concurrency=recipe.uploads, wake=waker, give_up=recipe.space_wait
        )
        stack.callback(uploader.close)
        depot = StagedDepot(
            to.store,
            staging,
            journal,
            fingerprint,
            Budget(limit),
            uploader,
            samples=samples,
            fallback=fallback,
            tell=lambda sentence: _LOG.info("extract: %s", sentence),
            high=high,
            low=low,
            space_wait=space_wait,
            read=read,
        )
        stack.callback(depot.close)
        _LOG.info(
            "extract: shards wait in %s, at most %s of them, and are uploaded to %s, %d at a time",
            *(staging.root, short_bytes(limit), to.store.url, recipe.uploads),
        )
        yield depot, staging.root


def _clear(folder: Path, run_root: Path) -> None:
    """Remove what dead runs without a run directory left; name what others may go on with."""
    removed, named = clear_leftovers(folder, run_root)
    if removed:
        freed = short_bytes(sum(left.bytes for left in removed))
        _LOG.info(
            "extract: removed %s of runs that are gone from %s, %s",
            *(counted(len(removed), "staging folder"), folder, freed),
        )
    for left in named:
        _LOG.warning(
            "extract: %s holds %s of the run %s, which is not at work; "
            "`paceline extract --run` there goes on with them, or remove the folder",
            *(left.path, short_bytes(left.bytes), left.run_root or "of an unknown name"),
        )
