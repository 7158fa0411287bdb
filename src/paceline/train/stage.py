"""`paceline train`: the drafter, trained on the stored features."""

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from paceline.drafter.checkpoint import CONFIG, WEIGHTS, load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import DataError, Interrupted, RecipeChanged, RecipeError
from paceline.features.reader import FeatureReader
from paceline.recipe.checkpoints import checkpoints
from paceline.recipe.drafter_inputs import drafter_input_fields
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Report, StageRecord
from paceline.recipe.training import CHANGEABLE, require_changeable, training_fields
from paceline.recipe.write import adopt_recipe
from paceline.target.head import TargetHead
from paceline.target.spec import TargetSpec, read_spec
from paceline.train.checkpoint import (
    TrainState,
    damage,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    restore_optimizer,
    restore_random,
)
from paceline.train.compute import compute_dtype
from paceline.train.kept import KeptCheckpoints, best_checkpoint
from paceline.train.loop import TrainData, Trainer
from paceline.train.report import choice, nothing_learned, worse
from paceline.train.resume import chosen_checkpoint, make_newest, refuse_foreign
from paceline.train.rng import seeded
from paceline.train.software import software, tell_drift
from paceline.train.source import (
    StoredFeatures,
    cache_warnings,
    planned_samples,
    training_samples_per_shard,
)
from paceline.train.start import Remarks, first_drafter, remarks_on
from paceline.train.vocabulary import VocabularyCounts
from paceline.types.sample import Split, read_samples
from paceline.watch.events import EventWriter, by_reason
from paceline.watch.progress import seconds_text

_LOG = logging.getLogger(__name__)

FORMAT_VERSION = 2


def run(
    recipe: Recipe,
    run_dir: RunDir,
    *,
    resume_from: str | None = None,
    allow_change: Sequence[str] = (),
) -> Report:
    """Train to the end, or go on from the newest checkpoint whose checksums hold.

    Args:
        recipe: what to do.
        run_dir: where.
        resume_from: go on from this checkpoint instead, a path or a name such as `step_000010`,
            even where the training has ended; newer ones are set aside.
        allow_change: keys such as `train.epochs` that may differ from what the checkpoints were
            made with; what differs is recorded.

    Raises:
        RecipeChanged: the checkpoints of another recipe stand in the run directory, or the one
            asked for is of another training.
        RecipeError: a key that cannot change in the middle of a training, or `train.epochs` that
            are over.
        UserError: there is no such checkpoint.
        ShardDamaged: a file of the checkpoint asked for is not as it was written.
        DataError: there is nothing to train on, or was not a token to learn from.

    """
    require_changeable(allow_change)
    with EventWriter(run_dir.events, "train") as events:
        try:
            return _run(recipe, run_dir, events, resume_from, allow_change)
        except Interrupted as stopped:
            if resume_from is None:
                raise
            # The same command would set the new checkpoint aside again.
            raise Interrupted(f"{stopped} (But leave --resume-from out.)") from stopped


def _run(
    recipe: Recipe,
    run_dir: RunDir,
    events: EventWriter,
    resume_from: str | None,
    allow_change: Sequence[str],
) -> Report:
    reader = _stored(recipe, run_dir).open()
    spec = read_spec(Path(recipe.target.path))
    if reader.manifest.target_identity != spec.identity:
        raise RecipeChanged(
            f"{run_dir.features}: the features are those of another target (identity "
            f"{reader.manifest.target_identity}) than {recipe.target.path} ({spec.identity}). Put "
            "that target back, or use a new run directory (`--run DIR`)."
        )
    record = StageRecord(
        run_dir.checkpoints,
        "train",
        _fields(recipe, reader, spec),
        changeable=CHANGEABLE,
        allowed=allow_change,
        binds=bool(checkpoints(run_dir.checkpoints)),
    )
    if record.is_done() and resume_from is None:
        best = run_dir.checkpoints / record.report["best"]
        line = choice(best, record.report["simulated_tau"])
        return Report(stage="train", skipped=True, numbers=record.report, lines=(line,))
    passed_over: Sequence[str] = ()
    if resume_from is not None:
        start = chosen_checkpoint(run_dir.checkpoints, resume_from)
    else:
        start, passed_over = newest_checkpoint(run_dir.checkpoints)
    if start is not None:
        refuse_foreign(start, record.fingerprints)
    data, used = _data(recipe, run_dir, reader)
    step = 0
    if start is not None:
        state = read_state(start)
        step = state.step
        _refuse_end(recipe, len(data.train), state.samples, record)
    _tell_overrides(record, step, events)
    _tell_lost_best(run_dir.checkpoints, record.report.get("best"))
    adopt_recipe(recipe, run_dir)
    record.begin(step=step)
    remove_leftovers(run_dir.checkpoints)
    if start is not None and resume_from is not None:
        start = make_newest(run_dir.checkpoints, start)
    redone = _tell_passed_over(run_dir.checkpoints, passed_over, events)
    with seeded(recipe.train.seed, torch.device(recipe.train.device)):
        return _train(recipe, run_dir, reader, spec, record, events, start, redone, data, used)


def _train(
    recipe: Recipe,
    run_dir: RunDir,
    reader: FeatureReader,
    spec: TargetSpec,
    record: StageRecord,
    events: EventWriter,
    start: Path | None,
    redone: Mapping[str, int],
    data: TrainData,
    used: Container[int],
) -> Report:
    torch.set_num_threads(recipe.train.threads)
    device = torch.device(recipe.train.device)
    counts = VocabularyCounts(
        recipe.drafter,
        spec,
        Path(recipe.target.path),
        samples=run_dir.samples(recipe),
        kept=run_dir.checkpoints / "text_counts.json",
    )
    taps = reader.manifest.layer_ids
    state = _fresh_state(record.fingerprint)
    if start is not None:
        # What it carried may be the fingerprint from before an override.
        state = replace(read_state(start), fingerprint=record.fingerprint)
        drafter = load_drafter(start, device=str(device))
        tell_drift(state.software)
    else:
        drafter = first_drafter(recipe, spec, taps, counts, used=used).to(device)
    # Masters are fp32, whatever a drafter to start from was saved in.
    drafter.float()
    remarks = remarks_on(recipe, spec, taps, counts, drafter)
    cramped = cache_warnings(reader, recipe.train.shard_window)
    remarks = replace(remarks, warnings=(*remarks.warnings, *cramped))
    for warning in remarks.warnings:
        _LOG.warning("%s", warning)
    head = drafter.narrowed(
        TargetHead.load(Path(recipe.target.path), dtype=compute_dtype(recipe.train), device=device)
    )
    trainer = Trainer(
        recipe.train,
        data,
        drafter,
        head,
        state,
        checkpoints=run_dir.checkpoints,
        events=events,
        redone=redone,
        claim=record.require_claim,
    )
    if start is not None:
        restore_optimizer(start, trainer.optimizer)
        restore_random(start, device)
        _LOG.info("going on from %s (%d samples done)", start.name, state.samples)
    kept = KeptCheckpoints(
        run_dir.checkpoints,
        recipe.train.keep_checkpoints,
        fingerprints=record.fingerprints,
        verified=start,
    )
    for folder in trainer.run():
        kept.add(folder, trainer.state.tau)
    report = _finish(run_dir, trainer.state, record, data, drafter, remarks)
    events.emit("finished", trainer.counts(), step=trainer.state.step, report=report.numbers)
    return report


def _refuse_end(recipe: Recipe, num_samples: int, done: int, record: StageRecord) -> None:
    """Raise RecipeError where the epochs asked for are over already.

    There would be nothing to train, and no evaluation of an end that the rate never fell to. A
    training that has come to the end of its own epochs may still have to be recorded as finished.
    """
    total = planned_samples(recipe.train.epochs, num_samples)
    changed = [change.key for change in record.changes() if change.key != "train.epochs"]
    if done == total and changed:
        raise RecipeError(
            f"{', '.join(changed)}: the training is at its end, {done} samples: nothing is left "
            "that the change could act on. Raise train.epochs as well, or --resume-from an earlier "
            "checkpoint."
        )
    if done > total or (done == total and record.changes()):
        raise RecipeError(
            f"train.epochs: {recipe.train.epochs:g} is over: {done} samples are done. Raise it, or "
            "--resume-from an earlier checkpoint."
        )


def _tell_overrides(record: StageRecord, step: int, events: EventWriter) -> None:
    for change in record.changes(step):
        _LOG.warning(
            "%s changes from %r to %r at step %d, by --allow-change",
            change.key, change.made, change.asked, step,
        )  # fmt: skip
        events.emit("override", key=change.key, made=change.made, asked=change.asked, step=step)
        if change.key.startswith("train.eval_"):
            _LOG.warning("evaluations from here on do not compare with those before")


def _tell_lost_best(root: Path, best: str | None) -> None:
    problem = damage(root / best) if best else ""
    if problem:
        _LOG.warning(
            "%s It was the best checkpoint: unless the training comes by its step again, the best "
            "of the others takes its place", problem,
        )  # fmt: skip


def _tell_passed_over(
    root: Path, passed_over: Sequence[str], events: EventWriter
) -> dict[str, int]:
    """Tell log and events of the damaged checkpoints; their number by reason."""
    reasons = []
    for problem in passed_over:
        _LOG.warning("passed over: %s", problem)
        name, _, reason = problem.removeprefix(f"{root}/").partition(": ")
        events.emit("redo", name=name, reason=reason)
        reasons.append(reason)
    return by_reason(reasons)


def _finish(
    run_dir: RunDir,
    state: TrainState,
    record: StageRecord,
    data: TrainData,
    drafter: DFlash,
    remarks: Remarks,
) -> Report:
    if not state.labels:
        raise DataError(nothing_learned(run_dir, state, drafter))
    best = best_checkpoint(run_dir.checkpoints, record.fingerprints)
    tau = read_state(best).tau
    warnings = [*remarks.warnings, *worse(run_dir, state, tau)]
    numbers: dict[str, Any] = {
        "best": best.name,
        "simulated_tau": tau,
        "first_tau": state.first_tau,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "samples": state.samples,
        "tokens": state.tokens,
        "labels": state.labels,
        "seconds": round(state.seconds, 1),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        **remarks.numbers,
        "remarks": [*(f"warning: {sentence}" for sentence in warnings), *remarks.facts],
    }
    record.finish([best / WEIGHTS, best / CONFIG], numbers)
    size = numbers["parameters"] / 1e6
    lines = [
        (
            f"{state.step} steps over {state.samples} samples ({len(data.train)} distinct) in "
            f"{seconds_text(state.seconds)}; {size:.1f} M trainable parameters"
        ),
        choice(best, tau),
    ]
    if state.skipped_steps:
        lines.append(f"{state.skipped_steps} steps had no finite gradient and changed nothing")
    lines += remarks.facts
    # Those of the start stand in the log.
    lines += [f"warning: {sentence}" for sentence in warnings[len(remarks.warnings) :]]
    return Report(stage="train", numbers=numbers, lines=tuple(lines))


def _data(recipe: Recipe, run_dir: RunDir, reader: FeatureReader) -> tuple[TrainData, set[int]]:
    splits: dict[str, Split] = {}
    used: set[int] = set()
    for sample in read_samples(run_dir.samples(recipe)):
        splits[sample.sample_id] = sample.split
        used.update(sample.input_ids)
    by_split: dict[Split, list[int]] = {split: [] for split in Split}
    for index, sample_id in enumerate(reader.sample_ids):
        if sample_id not in splits:
            raise DataError(
                f"{run_dir.features}: sample {sample_id} is not in {run_dir.samples(recipe)}. The "
                "features are those of another corpus: run `paceline extract` again."
            )
        by_split[splits[sample_id]].append(index)
    if not by_split[Split.TRAIN]:
        raise DataError(f"{run_dir.features}: no training samples. See the report of `prepare`.")
    data = TrainData(
        stored=_stored(recipe, run_dir),
        digest=reader.digest,
        train=tuple(by_split[Split.TRAIN]),
        shards=training_samples_per_shard(by_split[Split.TRAIN], reader.samples_per_shard),
        validation=tuple(
            _spread(by_split[Split.VALIDATION], recipe.train.eval_samples, reader.sample_ids)
        ),
        tokens=reader.lengths,
    )
    return data, used


def _stored(recipe: Recipe, run_dir: RunDir) -> StoredFeatures:
    """The features of a run, wherever their shards are."""
    return StoredFeatures(
        root=run_dir.features,
        options=recipe.extract.store_options,
        cache=run_dir.shard_cache,
        cache_bytes=recipe.train.cache_bytes,
    )


def _spread(indices: Sequence[int], count: int, ids: Sequence[str]) -> list[int]:
    """`count` of the indices, chosen by id: the store's order is by length."""
    return sorted(sorted(indices, key=lambda i: ids[i])[:count])


def _fields(recipe: Recipe, reader: FeatureReader, spec: TargetSpec) -> Fields:
    # What these two name counts by its content, wherever it lies.
    paths = ("warm_start", "vocab_text")
    own = flatten(
        {
            "format": FORMAT_VERSION,
            "features": reader.digest,
            "target": spec.identity,
            "drafter": {k: v for k, v in asdict(recipe.drafter).items() if k not in paths},
            "template_args": recipe.corpus.template_args,
            "train": training_fields(recipe.train),
        }
    )
    return own | drafter_input_fields(recipe.drafter)


def _fresh_state(fingerprint: str) -> TrainState:
    return TrainState(
        fingerprint=fingerprint,
        step=0,
        samples=0,
        bad_steps=0,
        skipped_steps=0,
        skipped_samples=0,
        tokens=0,
        seconds=0.0,
        software=software(),
    )
