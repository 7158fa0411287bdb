"""Where the shards of an extraction go, and what stands between a worker and that place."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.budget import Budget, check_budget
from paceline.durable.depot import Depot, Judge
from paceline.durable.fs import REAL_FS, remove_dead_partials
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.local_depot import LocalDepot
from paceline.durable.object_store import ObjectStore
from paceline.durable.open_store import is_local, local_path, open_store
from paceline.durable.space import Space, read_space
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import (
    SHARED_MEMORY,
    choose_staging,
    clear_leftovers,
    open_stagings,
    staging_limit,
    staging_needed,
)
from paceline.durable.store import LocalStore, Store
from paceline.durable.uploader import Uploader
from paceline.extract.watching import looked_after
from paceline.flow.waker import Waker
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe
from paceline.watch.events import EventWriter
from paceline.watch.words import command_line, counted, short_bytes

_LOG = logging.getLogger(__name__)

DEEP_BYTES = 1 << 30
"""A few seconds of reading, also where a disk is slow."""


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
        return DEEP_BYTES if isinstance(self.store, LocalStore) else 0

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
    judge: Judge,
    bounds: Sequence[int],
    largest: int,
    workers: int,
    watch: IoWatch,
    events: EventWriter,
    waker: Waker,
) -> Iterator[tuple[Depot, Path]]:
    """What keeps made units, and the folder that workers write to.

    `samples` gives a unit's number of samples, `judge` knows units that others have made in a
    store that is not the run's own, `bounds` are the most bytes that each unit to be made may take.
    `largest` is that of all units, made or not: the staging folder is chosen by it, so every start
    chooses as `paceline plan` does. Calls of the beginning and of the end that do not return are
    told by `events`; between them the supervisor looks after its own. Raises RecipeError for a
    staging budget below the largest unit to be made.
    """
    asked = _Asked(recipe, journal, fingerprint, samples, judge, watch, waker)
    with ExitStack() as stack:
        with looked_after(watch, events):
            if isinstance(to.store, LocalStore):
                opened = _open_folder(to.store, asked, is_own=to.is_own)
                stack.callback(opened[0].close)
            else:
                opened = _open_staged(to.store, asked, run_dir, bounds, largest, workers, stack)
        try:
            yield opened
        finally:
            with looked_after(watch, events):
                stack.close()


@dataclass(frozen=True)
class _Asked:
    """What every depot is made of."""

    recipe: ExtractRecipe
    journal: Journal
    fingerprint: str
    samples: Callable[[str], int]
    judge: Judge
    watch: IoWatch
    waker: Waker

    @property
    def fs(self) -> WatchedFs:
        return WatchedFs(REAL_FS, self.watch)

    def read(self, path: Path) -> Space:
        with self.watch.call("look for room", path):
            return read_space(path)

    def tell(self, sentence: str) -> None:
        _LOG.info("extract: %s", sentence)


def _open_folder(store: LocalStore, asked: _Asked, *, is_own: bool) -> tuple[Depot, Path]:
    folder = store.path("unit").parent
    asked.fs.make_dirs(folder)
    if not is_own:
        # The run's own folder is cleared when its record is opened.
        with asked.watch.call("list", folder):
            left = remove_dead_partials(folder, is_shared=True, fs=asked.fs)
        if left:
            words = counted(len(left), "unfinished file")
            _LOG.info("extract: removed %s of a killed run from %s", words, folder)
    depot = LocalDepot(
        store,
        asked.journal,
        asked.fingerprint,
        samples=asked.samples,
        judge=None if is_own else asked.judge,
        tell=asked.tell,
        space_wait=asked.recipe.space_wait,
        fs=asked.fs,
        read=asked.read,
    )
    return depot, folder


def _open_staged(
    store: Store,
    asked: _Asked,
    run_dir: RunDir,
    bounds: Sequence[int],
    largest: int,
    workers: int,
    stack: ExitStack,
) -> tuple[Depot, Path]:
    """`stack` closes what is opened."""
    recipe, watch = asked.recipe, asked.watch
    wanted = staging_needed(recipe.staging_bytes, largest, workers=workers, uploads=recipe.uploads)
    with watch.call("look for room", SHARED_MEMORY if recipe.staging == "auto" else recipe.staging):
        place = choose_staging(recipe.staging, run_dir.staging, wanted)
    for folder in {place, run_dir.staging}:
        with watch.call("look for leftovers", folder):
            _clear(folder, run_dir.root)
    staging, fallback = open_stagings(
        place, run_dir.staging, run_dir.root, fs=asked.fs, watch=watch
    )
    stack.callback(staging.close)
    if fallback is not None:
        stack.callback(fallback.close)
    # A disk that is full right now is waited for; only a budget that was given is refused.
    with watch.call("look for room", place):
        limit = recipe.staging_bytes or max(*bounds, 1, staging_limit(None, place))
    check_budget(limit, bounds)
    uploader = Uploader(
        store.watched(watch) if isinstance(store, ObjectStore) else store,
        concurrency=recipe.uploads,
        wake=asked.waker,
        judge=asked.judge,
        watch=watch,
        give_up=recipe.space_wait,
    )
    stack.callback(uploader.close)
    depot = StagedDepot(
        store,
        staging,
        asked.journal,
        asked.fingerprint,
        Budget(limit),
        uploader,
        samples=asked.samples,
        fallback=fallback,
        tell=asked.tell,
        high=recipe.high_mark,
        low=recipe.low_mark,
        space_wait=recipe.space_wait,
        read=asked.read,
    )
    stack.callback(depot.close)
    _LOG.info(
        "extract: shards wait in %s, at most %s of them, and are uploaded to %s, %d at a time",
        *(staging.root, short_bytes(limit), store.url, recipe.uploads),
    )
    return depot, staging.root


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
        held = f"{left.path} holds {short_bytes(left.bytes)}"
        remove = command_line("rm", "-r", "--", left.path)
        if left.run_root is None:
            _LOG.warning("extract: %s of a run that it does not name; `%s` frees it", held, remove)
            continue
        if left.run_root == run_root.absolute():
            _LOG.warning(
                "extract: %s of another run that has this one's path, such as its original in "
                "another container; where nothing is at work with it, `%s` frees it",
                *(held, remove),
            )
            continue
        go_on = command_line("paceline", "extract", "--run", left.run_root)
        _LOG.warning(
            "extract: %s of the run %s, which is not at work; `%s` goes on with them, or `%s`",
            *(held, left.run_root, go_on, remove),
        )
