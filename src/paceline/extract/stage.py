"""`paceline extract`: the target's hidden states, kept in a feature store."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paceline.durable.errors import JournalDamaged, PacelineError, RecipeChanged, UserError
from paceline.durable.fs import REAL_FS
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.session import HowEnded, end_record
from paceline.durable.store import Store
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination, destination
from paceline.extract.layout import JOURNAL, Layout
from paceline.extract.ledger import UNIT_PREFIX, is_intact
from paceline.extract.setting import Setting, kept_split
from paceline.extract.slices import ALL, Slice, parse_slice
from paceline.extract.watching import apart, asked_store, looked_after
from paceline.extract.work import Work
from paceline.features import manifest as manifests
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Report, StageRecord, read_record
from paceline.recipe.write import adopt_recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import taps_of
from paceline.watch.events import EventWriter

_STAGE = "extract"

_FORMAT = 1
"""Of what a unit holds, whatever codes it: another number makes all features another recipe's."""


def run(
    recipe: Recipe, run_dir: RunDir, *, shard: str | None = None, accept_code: bool = False
) -> Report:
    """Capture every trainable sample, or find that it has been done.

    Continues where an earlier run ended, however it ended: a unit counts as done only where the
    store proves it. The manifest is published last. `shard`, such as `2/4`, is the part that this
    machine does of a store that several share; `accept_code` goes on there with other code.

    Raises RecipeError for impossible taps or places, RecipeChanged where another recipe's features
    stand in the run directory, DataError for a corpus that does not fit the target, UserError
    where another process extracts into the same folder and for `shard` without a shared store,
    JournalDamaged, TargetError where the target fails its checks, StorageRefused and StoreFailed
    for places without room or answer, WorkerFailed when no worker is left, and Interrupted; what
    is verified by then is kept.
    """
    part = ALL if shard is None else parse_slice(shard)
    with EventWriter(run_dir.events, _STAGE) as events:
        return _run(recipe, run_dir, events, part, accept_code=accept_code)


def _run(
    recipe: Recipe, run_dir: RunDir, events: EventWriter, part: Slice, *, accept_code: bool
) -> Report:
    if part.count > 1 and not recipe.extract.store:
        raise UserError(
            f"--shard {part}: machines that share the work need a store that all of them reach. "
            "Give extract.store, such as s3://bucket/prefix."
        )
    watch = IoWatch()
    with looked_after(watch, events):
        setting, record, to = apart(
            lambda: open_setting(recipe, run_dir, part, accept_code=accept_code, watch=watch)
        )
        store = asked_store(to.store, recipe.extract, watch, events)
        is_done = apart(lambda: is_complete(setting, record, to, watch, store))
    if is_done:
        return Report(
            stage=_STAGE,
            skipped=True,
            numbers=record.report,
            lines=("extract: already done with this recipe, and verified; nothing to do.",),
            # What was found then is as true as it was.
            undone=tuple(record.report.get("gaps", ())),
        )
    with ExitStack() as opened:
        with looked_after(watch, events):
            path = run_dir.features / JOURNAL
            journal = opened.enter_context(open_journal(run_dir.root, path, watch))
            with watch.call("begin in", run_dir.root):
                adopt_recipe(recipe, run_dir)
                leftovers = record.begin()
        work = Work(setting, to, record, journal, events, leftovers, watch)
        with end_noted(journal, watch, events):
            return work.do()


def open_setting(
    recipe: Recipe,
    run_dir: RunDir,
    part: Slice = ALL,
    *,
    accept_code: bool = False,
    watch: IoWatch | None = None,
) -> tuple[Setting, StageRecord, Destination]:
    """What an extraction by this recipe is, its record and its store; nothing is written.

    Calls that do not return are known to `watch`. Raises as `run` does for what is impossible
    before the work begins.
    """
    source = run_dir.samples(recipe)
    watch = watch or IoWatch()
    corpus_digest = digest_file(source, around=lambda: watch.call("read corpus", source))
    target = Path(recipe.target.path)
    with watch.call("read target", target):
        spec = read_spec(target, around=lambda: watch.call("read target", target))
    layer_ids = taps_of(recipe.extract, spec.num_layers)
    with watch.call("read records", run_dir.root):
        _require_same_target(recipe, run_dir, spec)
        record = StageRecord(
            run_dir.features,
            _STAGE,
            _fields(recipe, corpus_digest, spec, layer_ids),
            binds=any(run_dir.features.glob(f"{UNIT_PREFIX}*")) or _has_records(run_dir),
        )
    setting = Setting(
        recipe=recipe,
        run_dir=run_dir,
        source=source,
        corpus_digest=corpus_digest,
        spec=spec,
        layout=Layout(
            target_identity=spec.identity,
            hidden_size=spec.hidden_size,
            layer_ids=layer_ids,
            last=recipe.extract.last,
            dtype=recipe.extract.dtype,
            codec=resolved_codec(recipe.extract),
            shard_bytes=recipe.extract.shard_bytes,
        ),
        part=part,
        accept_code=accept_code,
    )
    with watch.call("open store", recipe.extract.store or run_dir.features):
        return setting, record, destination(recipe.extract, run_dir, record.fingerprint)


def is_complete(
    setting: Setting,
    record: StageRecord,
    to: Destination,
    watch: IoWatch,
    store: Store | None = None,
) -> bool:
    """Whether the extraction is finished and its store stands. Raises as `StageRecord.is_done`.

    `store` is that of `to` as it is to be asked, where that is not at once or never.
    """
    with watch.call("read records", setting.run_dir.features):
        is_done = record.is_done()
    store = store or WatchedStore(to.store, watch)
    return is_done and _is_whole(setting.recipe, setting.run_dir, store, to.deep_bytes, watch)


def _is_whole(
    recipe: Recipe, run_dir: RunDir, store: Store, deep_bytes: int, watch: IoWatch
) -> bool:
    """Whether the published store stands as listed; shards set aside are tried again."""
    with watch.call("read manifest", run_dir.features):
        manifest = manifests.load(run_dir.features)
    if len(manifest.quarantined) > recipe.extract.allow_quarantined:
        return False
    return is_intact(manifest, store, deep_bytes=deep_bytes)


def open_journal(run: Path, path: Path, watch: IoWatch) -> Journal:
    """The journal of an extraction. Raises as `Journal`, and says how a damaged one is mended."""
    try:
        with watch.call("open journal", path):
            return Journal(path, fs=WatchedFs(REAL_FS, watch))
    except JournalDamaged as error:
        raise JournalDamaged(
            f"{error} `paceline verify {run} --repair` sets it aside and writes a new one from "
            "what the store proves: nothing that is whole is made again."
        ) from error


def _has_records(run_dir: RunDir) -> bool:
    """Whether a journal tells of units, wherever they are."""
    path = run_dir.features / JOURNAL
    return path.is_file() and path.stat().st_size > 0


@contextmanager
def end_noted(journal: Journal, watch: IoWatch, events: EventWriter) -> Iterator[None]:
    """Leave word in the journal of how the work inside ends.

    `watch` is the journal's; a call there that does not return is told by `events`.
    """
    how: HowEnded = "finished"
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        how, ending = _how(error), error
        raise
    finally:
        with looked_after(watch, events):
            _end(journal, how, ending)


def _how(error: BaseException) -> HowEnded:
    is_signal = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 1) == 130
    return "interrupted" if is_signal else "failed"


def _end(journal: Journal, how: HowEnded, error: BaseException | None) -> None:
    """Leave word of the end; where even that finds no room, the events have it."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    with suppress(OSError, PacelineError):
        journal.append(end_record(how, text))


def _require_same_target(recipe: Recipe, run_dir: RunDir, spec: TargetSpec) -> None:
    """A drafter learns from one target's words and states; another one's weights are refused."""
    answered = read_record(run_dir.corpus, "regenerate") if recipe.regenerate.enabled else None
    if answered is not None and answered.fields.get("target") != spec.identity:
        raise RecipeChanged(
            f"{run_dir.corpus}: the answers are those of another target (identity "
            f"{answered.fields.get('target')}) than {recipe.target.path} ({spec.identity}). Put "
            "that target back, or use a new run directory (`--run DIR`)."
        )


def _fields(
    recipe: Recipe, corpus_digest: str, spec: TargetSpec, layer_ids: tuple[int, ...]
) -> Fields:
    """Everything that determines the shards' content.

    Left out because they do not: the target's path and devices, workers and threads, the store,
    and `batch_tokens` and `chunk_tokens` (they decide what is computed together, which changes
    nothing but a kernel's rounding; the rows of a shard stand in the same order).
    """
    extract = {
        "layer_ids": layer_ids,
        "last": recipe.extract.last,
        "dtype": recipe.extract.dtype,
        "shard_bytes": recipe.extract.shard_bytes,
    }
    codec = resolved_codec(recipe.extract)
    if codec != "none":
        # Without a codec the shards are those that were made before there were any.
        extract["codec"] = codec
    kept = kept_split(recipe)
    if kept is not None:
        extract["samples"] = kept.value
    return flatten(
        {
            "format": _FORMAT,
            "corpus": corpus_digest,
            "target": {"identity": spec.identity, "dtype": recipe.target.dtype},
            "extract": extract,
        }
    )
