"""`paceline extract`: the target's hidden states, kept in a feature store."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.durable.errors import JournalDamaged, PacelineError, RecipeChanged, UserError
from paceline.durable.fs import REAL_FS
from paceline.durable.iowatch import IoWatch, WatchedFs
from paceline.durable.journal import Journal
from paceline.durable.session import HowEnded, end_record
from paceline.durable.watched_store import WatchedStore
from paceline.extract.destination import Destination, destination
from paceline.extract.layout import JOURNAL, Layout
from paceline.extract.ledger import UNIT_PREFIX, is_intact
from paceline.extract.setting import Setting
from paceline.extract.slices import ALL, Slice, parse_slice
from paceline.extract.watching import looked_after
from paceline.extract.work import Work
from paceline.features import manifest as manifests
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe, Recipe
from paceline.recipe.stage import Report, StageRecord, read_record
from paceline.recipe.write import adopt_recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import check_taps, default_taps
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
        setting, record, to = open_setting(recipe, run_dir, part, accept_code=accept_code)
        is_done = is_complete(setting, record, to, watch)
    if is_done:
        return Report(
            stage=_STAGE,
            skipped=True,
            numbers=record.report,
            lines=("extract: already done with this recipe, and verified; nothing to do.",),
        )
    with open_journal(run_dir.root, run_dir.features / JOURNAL, watch) as journal:
        adopt_recipe(recipe, run_dir)
        leftovers = record.begin()
        work = Work(setting, to, record, journal, events, leftovers, watch)
        with end_noted(journal):
            return work.do()


def open_setting(
    recipe: Recipe, run_dir: RunDir, part: Slice = ALL, *, accept_code: bool = False
) -> tuple[Setting, StageRecord, Destination]:
    """What an extraction by this recipe is, its record and its store; nothing is written.

    Raises as `run` does for what is impossible before the work begins.
    """
    source = run_dir.samples(recipe)
    corpus_digest = digest_file(source)
    spec = read_spec(Path(recipe.target.path))
    layer_ids = resolve_taps(recipe.extract, spec.num_layers)
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
    return setting, record, destination(recipe.extract, run_dir, record.fingerprint)


def is_complete(setting: Setting, record: StageRecord, to: Destination, watch: IoWatch) -> bool:
    """Whether the extraction is finished and its store stands. Raises as `StageRecord.is_done`."""
    return record.is_done() and _is_whole(setting.recipe, setting.run_dir, to, watch)


def resolve_taps(recipe: ExtractRecipe, num_layers: int) -> tuple[int, ...]:
    """The layers to tap: those named, else `num_taps` spread over the target.

    Raises RecipeError for ids that do not rise, are out of range, or name the last layer.
    """
    if recipe.taps is None:
        return default_taps(num_layers, recipe.num_taps)
    check_taps(recipe.taps, num_layers)
    return recipe.taps


def _is_whole(recipe: Recipe, run_dir: RunDir, to: Destination, watch: IoWatch) -> bool:
    """Whether the published store stands as listed; shards set aside are tried again."""
    manifest = manifests.load(run_dir.features)
    if len(manifest.quarantined) > recipe.extract.allow_quarantined:
        return False
    return is_intact(manifest, WatchedStore(to.store, watch), deep_bytes=to.deep_bytes)


def open_journal(run: Path, path: Path, watch: IoWatch) -> Journal:
    """The journal of an extraction. Raises as `Journal`, and says how a damaged one is mended."""
    try:
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
def end_noted(journal: Journal) -> Iterator[None]:
    """Leave word in the journal of how the work inside ends."""
    try:
        yield
    except BaseException as error:
        _end(journal, _how(error), error)
        raise
    _end(journal, "finished")


def _how(error: BaseException) -> HowEnded:
    is_signal = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 1) == 130
    return "interrupted" if is_signal else "failed"


def _end(journal: Journal, how: HowEnded, error: BaseException | None = None) -> None:
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
    return flatten(
        {
            "format": _FORMAT,
            "corpus": corpus_digest,
            "target": {"identity": spec.identity, "dtype": recipe.target.dtype},
            "extract": extract,
        }
    )
