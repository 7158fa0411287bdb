"""`paceline extract`: the target's hidden states, kept in a feature store."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import RecipeChanged
from paceline.durable.journal import Journal
from paceline.durable.store import LocalStore, Stat
from paceline.extract.ledger import Survey, is_intact, record_verified, survey
from paceline.extract.progress import Progress
from paceline.extract.rows import Rows, index_rows
from paceline.extract.worker import Job, UnitDone, UnitTask, open_worker
from paceline.features import manifest as manifests
from paceline.features.manifest import Manifest, UnitEntry
from paceline.features.plan import Unit, plan_units
from paceline.features.shard import FORMAT_VERSION
from paceline.features.sizes import bytes_per_token, store_bytes
from paceline.flow.launch import map_items
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe, Recipe
from paceline.recipe.stage import Report, StageRecord, read_record
from paceline.recipe.write import adopt_recipe
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import check_taps, default_taps
from paceline.types import LayerConvention
from paceline.watch.events import EventWriter, by_reason

_LOG = logging.getLogger(__name__)

_STAGE = "extract"
_UNIT_PREFIX = "unit-"
_CHECK_SAMPLES = 4


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Capture every trainable sample, or find that it has been done.

    Continues where an earlier run ended, however it ended: a unit counts as done only where the
    journal says so and the store's bytes agree. The manifest is published last.

    Raises RecipeError for impossible taps, RecipeChanged where another recipe's features stand in
    the run directory, DataError for a corpus that does not fit the target, UserError where
    another process extracts into the same folder, JournalDamaged, TargetError where the target
    fails its self-check, and whatever a worker raises; all units verified by then are kept.
    """
    with EventWriter(run_dir.events, _STAGE) as events:
        return _run(recipe, run_dir, events)


def _run(recipe: Recipe, run_dir: RunDir, events: EventWriter) -> Report:
    source = run_dir.samples(recipe)
    corpus_digest = digest_file(source)
    spec = read_spec(Path(recipe.target.path))
    layer_ids = resolve_taps(recipe.extract, spec.num_layers)
    _require_same_target(recipe, run_dir, spec)
    record = StageRecord(
        run_dir.features,
        _STAGE,
        _fields(recipe, corpus_digest, spec, layer_ids),
        binds=any(run_dir.features.glob(f"{_UNIT_PREFIX}*")),
    )
    store = LocalStore(run_dir.features)
    if record.is_done() and is_intact(manifests.load(run_dir.features), store):
        return Report(
            stage=_STAGE,
            skipped=True,
            numbers=record.report,
            lines=("extract: already done with this recipe, and verified; nothing to do.",),
        )
    with Journal(run_dir.features / "journal.jsonl") as journal:
        adopt_recipe(recipe, run_dir)
        leftovers = record.begin()
        work = _Work(
            recipe, run_dir, source, spec, layer_ids, record, store, journal, events, leftovers
        )
        return work.do()


def resolve_taps(recipe: ExtractRecipe, num_layers: int) -> tuple[int, ...]:
    """The layers to tap: those named, else `num_taps` spread over the target.

    Raises RecipeError for ids that do not rise, are out of range, or name the last layer.
    """
    if recipe.taps is None:
        return default_taps(num_layers, recipe.num_taps)
    check_taps(recipe.taps, num_layers)
    return recipe.taps


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

    Left out because they do not: the target's path and device, workers and threads, and
    `batch_tokens` (it decides what is padded together, and padding changes nothing but a
    kernel's rounding; the rows of a shard stand in the same order).
    """
    return flatten(
        {
            "format": FORMAT_VERSION,
            "corpus": corpus_digest,
            "target": {"identity": spec.identity, "dtype": recipe.target.dtype},
            "extract": {
                "layer_ids": layer_ids,
                "last": recipe.extract.last,
                "dtype": recipe.extract.dtype,
                "shard_bytes": recipe.extract.shard_bytes,
            },
        }
    )


@dataclass(frozen=True)
class _Work:
    recipe: Recipe
    run_dir: RunDir
    source: Path
    spec: TargetSpec
    layer_ids: tuple[int, ...]
    record: StageRecord
    store: LocalStore
    journal: Journal
    events: EventWriter
    leftovers: Sequence[str]
    """Unfinished files of killed runs, removed."""

    def do(self) -> Report:
        asked = self.recipe.extract
        rows = index_rows(
            self.source, vocab_size=self.spec.vocab_size, max_position=self.spec.max_position
        )
        token_bytes = bytes_per_token(
            len(self.layer_ids), self.spec.hidden_size, last=asked.last, dtype=asked.dtype
        )
        units = plan_units(
            rows.lengths,
            bytes_per_token=token_bytes,
            shard_bytes=asked.shard_bytes,
            batch_tokens=asked.batch_tokens,
        )
        estimate = store_bytes(
            tokens=sum(rows.lengths),
            samples=len(rows.lengths),
            shards=len(units),
            bytes_per_token=token_bytes,
        )
        found = survey(self.journal, self.store, units, self.record.fingerprint)
        self._announce(rows, units, found, token_bytes, estimate)
        progress = Progress(
            self.events,
            units,
            rows.lengths,
            skipped=set(found.done),
            redone=by_reason(found.redo.values()),
            workers=max(1, min(self.recipe.target.workers, len(units) - len(found.done))),
        )
        self.events.emit(
            "start",
            progress.counts(),
            **progress.more(),
            fingerprint=self.record.fingerprint,
            layer_ids=self.layer_ids,
            bytes_per_token=token_bytes,
            bytes_estimated=estimate,
        )
        stats = self._capture(rows, units, found, progress)
        manifest = self._manifest(rows, units, stats)
        path = manifests.publish(self.run_dir.features, manifest)
        numbers = {
            "samples": len(rows.lengths),
            "tokens": sum(rows.lengths),
            "loss_tokens": sum(rows.loss_tokens),
            "left_out_heldout": rows.heldout,
            "left_out_without_loss": rows.without_loss,
            "units": len(units),
            "units_of_earlier_runs": len(found.done),
            "units_redone": len(found.redo),
            "bytes": sum(stat.size for stat in stats.values()),
            "bytes_estimated": estimate,
            "bytes_per_token": token_bytes,
            "tokens_per_s": progress.tokens_per_s,
            "layer_ids": list(self.layer_ids),
            "last": asked.last,
            "manifest": manifest.digest,
        }
        self.record.finish([path], numbers)
        self.events.emit("finished", progress.counts(), **progress.more(), report=numbers)
        lines = (*_lines(numbers), *self._findings(units, found))
        return Report(stage=_STAGE, numbers=numbers, lines=lines)

    def _announce(
        self, rows: Rows, units: Sequence[Unit], found: Survey, token_bytes: int, estimate: int
    ) -> None:
        _LOG.info(
            "extract: %s tokens of %s samples, layers %s%s, %s bytes a token: "
            "about %s in %s shards",
            f"{sum(rows.lengths):,}",
            f"{len(rows.lengths):,}",
            ", ".join(map(str, self.layer_ids)),
            " and last" if self.recipe.extract.last else "",
            f"{token_bytes:,}",
            bytes_text(estimate),
            f"{len(units):,}",
        )
        if found.done:
            _LOG.info("extract: %s shards are done and verified", f"{len(found.done):,}")
        for key, reason in found.redo.items():
            _LOG.warning("extract: %s is redone: %s", key, reason)
            self.events.emit("redo", name=key, reason=reason)

    def _capture(
        self, rows: Rows, units: Sequence[Unit], found: Survey, progress: Progress
    ) -> dict[int, Stat]:
        """Do every unit that is not done; return all units' sizes."""
        stats = dict(found.done)
        tasks = [
            UnitTask(
                index=unit.index,
                key=unit.key,
                positions=tuple(rows.positions[sample] for sample in unit.samples),
                batches=tuple(len(batch) for batch in unit.batches),
            )
            for unit in units
            if unit.index not in found.done
        ]
        with progress:

            def on_result(task: UnitTask, result: UnitDone) -> None:
                unit = units[task.index]
                record_verified(self.journal, unit, result.stat, self.record.fingerprint)
                stats[task.index] = result.stat
                progress.add(task.index, result)

            map_items(
                open_worker,
                self._job(rows),
                tasks,
                workers=progress.workers,
                threads=self.recipe.target.threads,
                on_result=on_result,
                what="shards",
            )
        return stats

    def _job(self, rows: Rows) -> Job:
        return Job(
            target=self.recipe.target,
            corpus=self.source,
            store=self.run_dir.features,
            layer_ids=self.layer_ids,
            last=self.recipe.extract.last,
            dtype=self.recipe.extract.dtype,
            fingerprint=self.record.fingerprint,
            check_positions=rows.positions[:_CHECK_SAMPLES],
        )

    def _manifest(self, rows: Rows, units: Sequence[Unit], stats: dict[int, Stat]) -> Manifest:
        return Manifest(
            fingerprint=self.record.fingerprint,
            target_identity=self.spec.identity,
            hidden_size=self.spec.hidden_size,
            layer_ids=self.layer_ids,
            layer_convention=LayerConvention.OUTPUT_AFTER_LAYER,
            last=self.recipe.extract.last,
            dtype=self.recipe.extract.dtype,
            units=tuple(
                UnitEntry(
                    key=unit.key,
                    size=stats[unit.index].size,
                    crc64=crc64_hex(stats[unit.index].crc64),
                    sample_ids=tuple(rows.sample_ids[s] for s in unit.samples),
                    lengths=tuple(rows.lengths[s] for s in unit.samples),
                    loss_tokens=tuple(rows.loss_tokens[s] for s in unit.samples),
                )
                for unit in units
            ),
        )

    def _findings(self, units: Sequence[Unit], found: Survey) -> list[str]:
        lines = [f"{key} was redone: {reason}." for key, reason in found.redo.items()]
        if self.leftovers:
            lines.append(f"removed {len(self.leftovers)} unfinished files of a killed run.")
        planned = {unit.key for unit in units}
        foreign = [key for key in self.store.list(_UNIT_PREFIX) if key not in planned]
        if foreign:
            lines.append(f"{len(foreign)} files are not of this plan, {foreign[0]} first; kept.")
        return lines


def bytes_text(size: float) -> str:
    """`3.93 TB (3.58 TiB)`; plain bytes below 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    power = 1
    while size >= 1000 ** (power + 1) and power < 5:
        power += 1
    unit = "kMGTP"[power - 1]
    return f"{size / 1000**power:.2f} {unit}B ({size / 1024**power:.2f} {unit.upper()}iB)"


def _lines(numbers: dict[str, Any]) -> tuple[str, ...]:
    rate = numbers["tokens_per_s"]
    read = numbers["samples"] + numbers["left_out_heldout"] + numbers["left_out_without_loss"]
    kept = (
        f"{numbers['samples']:,} samples with {numbers['tokens']:,} tokens in "
        f"{numbers['units']:,} shards, {bytes_text(numbers['bytes'])}"
        + ("." if rate is None else f", {rate:,.0f} tokens/s.")
    )
    left_out = (
        f"of {read:,} samples read, {numbers['left_out_heldout']:,} are held out for the score "
        f"and {numbers['left_out_without_loss']:,} have no answer to train on."
    )
    return kept, left_out
