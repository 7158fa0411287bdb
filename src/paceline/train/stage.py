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
from paceline.target.spec import TargetSpec, read_spec
from paceline.trackers.fan_out import Trackers, trackers_of
from paceline.train.checkpoint import (
    TrainState,
    damage,
    fresh_state,
    newest_checkpoint,
    read_state,
    remove_leftovers,
)
from paceline.train.data import TrainData, open_data, stored_of
from paceline.train.fork import open_fork
from paceline.train.kept import KeptCheckpoints, best_checkpoint
from paceline.train.loop import Trainer
from paceline.train.memory import LOADING, Meter, Use, numbers_of, shape_of
from paceline.train.opening import Told, open_crew, open_feed
from paceline.train.report import choice, left_out, nothing_learned, worse
from paceline.train.resume import chosen_checkpoint, make_newest, refuse_foreign
from paceline.train.rng import seeded
from paceline.train.schedule import warmup_share
from paceline.train.sides import sides_of
from paceline.train.software import software, tell_drift
from paceline.train.source import cache_warnings, planned_samples
from paceline.train.start import Remarks, first_drafter, remarks_on
from paceline.train.team_files import complete_what_was_left
from paceline.train.vocabulary import VocabularyCounts
from paceline.watch.events import EventWriter, by_reason
from paceline.watch.progress import seconds_text

_LOG = logging.getLogger(__name__)

FORMAT_VERSION = 2


def run(
    recipe: Recipe,
    run_dir: RunDir,
    *,
    resume_from: str | None = None,
    fork_from: str | None = None,
    allow_change: Sequence[str] = (),
) -> Report:
    """Train to the end, or go on from the newest checkpoint whose checksums hold.

    Args:
        recipe: what to do.
        run_dir: where.
        resume_from: go on from this checkpoint instead, a path or a name such as `step_000010`,
            even where the training has ended; newer ones are set aside.
        fork_from: begin with this checkpoint of another run, a path; where this run has begun with
            it, go on.
        allow_change: keys such as `train.epochs` that may differ from what the checkpoints were
            made with; what differs is recorded.

    Raises:
        RecipeChanged: the checkpoints of another recipe stand in the run directory, or the one
            asked for is of another training; the one to fork from, of one too different.
        RecipeError: a key that cannot change in the middle of a training, or `train.epochs` that
            are over.
        UserError: there is no such checkpoint, the newest is of a newer version, or there are
            checkpoints where a fork would begin.
        ShardDamaged: a file of the checkpoint asked for is not as it was written.
        DataError: there is nothing to train on, or was not a token to learn from.

    """
    require_changeable(allow_change)
    with (
        trackers_of(recipe, run_dir) as trackers,
        EventWriter(run_dir.events, "train", listener=trackers.hear) as events,
    ):
        try:
            return _run(recipe, run_dir, events, trackers, resume_from, fork_from, allow_change)
        except Interrupted as stopped:
            if resume_from is None:
                raise
            # The same command would set the new checkpoint aside again.
            raise Interrupted(f"{stopped} (But leave --resume-from out.)") from stopped


def _run(
    recipe: Recipe,
    run_dir: RunDir,
    events: EventWriter,
    trackers: Trackers,
    resume_from: str | None,
    fork_from: str | None,
    allow_change: Sequence[str],
) -> Report:
    reader = stored_of(recipe, run_dir).open()
    spec = read_spec(Path(recipe.target.path))
    if reader.manifest.target_identity != spec.identity:
        raise RecipeChanged(
            f"{run_dir.features}: the features are those of another target (identity "
            f"{reader.manifest.target_identity}) than {recipe.target.path} ({spec.identity}). Put "
            "that target back, or use a new run directory (`--run DIR`)."
        )
    fields = _fields(recipe, reader, spec)
    fork = open_fork(run_dir.checkpoints, fork_from, fields) if fork_from is not None else None
    record = StageRecord(
        run_dir.checkpoints,
        "train",
        fields,
        changeable=CHANGEABLE,
        allowed=CHANGEABLE if fork else allow_change,
        binds=bool(checkpoints(run_dir.checkpoints)),
        begins_from=fork.made if fork else None,
    )
    if record.is_done() and resume_from is None:
        best = run_dir.checkpoints / record.report["best"]
        return Report(
            stage="train",
            skipped=True,
            numbers=record.report,
            lines=(choice(best, record.report["simulated_tau"]),),
            # What was found then is as true as it was.
            undone=left_out(record.report.get("set_aside", 0)),
        )
    passed_over: Sequence[str] = ()
    if fork is not None:
        start = fork.folder
    else:
        # Also where another is asked for: what is newer than that is set aside then.
        for made in complete_what_was_left(run_dir.checkpoints):
            _LOG.info("%s: averaged now; the last run ended in the middle of it", made)
        if resume_from is not None:
            start = chosen_checkpoint(run_dir.checkpoints, resume_from)
        else:
            start, passed_over = newest_checkpoint(run_dir.checkpoints)
    if start is not None:
        refuse_foreign(start, record.fingerprints, fields)
    data, used = open_data(recipe, run_dir, reader, spec)
    step = 0
    if start is not None:
        state = read_state(start)
        step = state.step
        _refuse_end(recipe, data.num_train, state.samples, record, is_fork=fork is not None)
    # Raises where the warm-up is longer than the run.
    warmup_share(recipe.train, planned_samples(recipe.train.epochs, data.num_train))
    _tell_overrides(record, step, events, "--fork-from" if fork else "--allow-change")
    measures_alike = not any(c.key.startswith("train.eval_") for c in record.changes())
    _tell_lost_best(run_dir.checkpoints, record.report.get("best"))
    adopt_recipe(recipe, run_dir)
    record.begin(step=step)
    remove_leftovers(run_dir.checkpoints)
    if fork is not None:
        start = fork.begin(run_dir.checkpoints, record.fingerprint, keep_tau=measures_alike)
        _LOG.info("%s, at step %d", fork.parent.words(), fork.parent.step)
        events.emit("fork", **asdict(fork.parent))
    elif start is not None and resume_from is not None:
        start = make_newest(run_dir.checkpoints, start)
    redone = _tell_passed_over(run_dir.checkpoints, passed_over, events)
    with seeded(recipe.train.seed, torch.device(recipe.train.device)):
        return _train(
            recipe, run_dir, reader, spec, record, events, trackers, start, redone, data, used
        )


def _train(
    recipe: Recipe,
    run_dir: RunDir,
    reader: FeatureReader,
    spec: TargetSpec,
    record: StageRecord,
    events: EventWriter,
    trackers: Trackers,
    start: Path | None,
    redone: Mapping[str, int],
    data: TrainData,
    used: Container[int],
) -> Report:
    # Several drafters begin with what this process holds; each has a device of its own.
    device = torch.device("cpu" if recipe.train.drafter_devices else recipe.train.device)
    counts = VocabularyCounts(
        recipe.drafter,
        spec,
        Path(recipe.target.path),
        samples=run_dir.samples(recipe),
        kept=run_dir.checkpoints / "text_counts.json",
    )
    taps = reader.manifest.layer_ids
    state = fresh_state(record.fingerprint, software())
    if start is not None:
        # What it carried may be the fingerprint from before an override.
        state = replace(read_state(start), fingerprint=record.fingerprint)
        with Meter(device).phase(LOADING):
            drafter = load_drafter(start, device=str(device))
        tell_drift(state.software)
    else:
        drafter = first_drafter(recipe, spec, taps, counts, used=used)
        with Meter(device).phase(LOADING):
            drafter = drafter.to(device)
    state = replace(state, tracker=trackers.claim(state.tracker))
    # Masters are fp32, whatever a drafter to start from was saved in.
    drafter.float()
    remarks = remarks_on(recipe, spec, taps, counts, drafter)
    cramped = cache_warnings(reader, recipe.train.shard_window)
    remarks = replace(remarks, warnings=(*remarks.warnings, *cramped))
    if state.parent is not None:
        remarks = replace(remarks, facts=(state.parent.words(), *remarks.facts))
    for warning in remarks.warnings:
        _LOG.warning("%s", warning)
    kept = KeptCheckpoints(
        run_dir.checkpoints,
        recipe.train.keep_checkpoints,
        every=recipe.train.keep_every,
        fingerprints=record.fingerprints,
        verified=start,
    )
    sides, told = sides_of(recipe), Told(events)
    with open_crew(recipe, data, drafter, start, told) as crew:
        trainer = Trainer(
            recipe.train,
            data,
            crew,
            state,
            feed=lambda agenda: open_feed(
                recipe,
                run_dir,
                data,
                reader.manifest,
                agenda,
                sides,
                told,
                shape=shape_of(drafter.config),
            ),
            sides=sides,
            checkpoints=run_dir.checkpoints,
            events=events,
            redone=redone,
            claim=record.require_claim,
        )
        if start is not None:
            _LOG.info("going on from %s (%d samples done)", start.name, state.samples)
        for folder in trainer.run():
            kept.add(folder, trainer.state.tau)
        memory = crew.memory()
        waits = sides.numbers(trainer.state.tokens - state.tokens)
    balance = [s for s in (*sides.sentences(), told.sentence()) if s]
    if told.deaths:
        waits["worker_deaths"] = told.deaths
    report = _finish(run_dir, trainer.state, record, data, drafter, remarks, waits, balance, memory)
    events.emit("finished", trainer.counts(), step=trainer.state.step, report=report.numbers)
    return report


def _refuse_end(
    recipe: Recipe, num_samples: int, done: int, record: StageRecord, *, is_fork: bool
) -> None:
    """Raise RecipeError where the epochs asked for are over already.

    There would be nothing to train, and no evaluation of an end that the rate never fell to. A
    training that has come to the end of its own epochs may still have to be recorded as finished.
    """
    total = planned_samples(recipe.train.epochs, num_samples)
    flag = "--fork-from" if is_fork else "--resume-from"
    changed = [change.key for change in record.changes() if change.key != "train.epochs"]
    if done == total and changed:
        raise RecipeError(
            f"{', '.join(changed)}: the training is at its end, {done} samples: nothing is left "
            f"that the change could act on. Raise train.epochs as well, or {flag} an earlier "
            "checkpoint."
        )
    if done > total or (done == total and (record.changes() or is_fork)):
        raise RecipeError(
            f"train.epochs: {recipe.train.epochs:g} is over: {done} samples are done. Raise it, or "
            f"{flag} an earlier checkpoint."
        )


def _tell_overrides(record: StageRecord, step: int, events: EventWriter, flag: str) -> None:
    for change in record.changes(step):
        _LOG.warning(
            "%s changes from %r to %r at step %d, by %s",
            change.key, change.made, change.asked, step, flag,
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
    waits: Mapping[str, Any],
    balance: Sequence[str],
    memory: Sequence[Use],
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
        "set_aside": state.set_aside,
        "samples": state.samples,
        "tokens": state.tokens,
        "labels": state.labels,
        "seconds": round(state.seconds, 1),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        **({"parent": asdict(state.parent)} if state.parent else {}),
        **remarks.numbers,
        **waits,
        **numbers_of(memory),
        "remarks": [*(f"warning: {sentence}" for sentence in warnings), *remarks.facts],
    }
    record.finish([best / WEIGHTS, best / CONFIG], numbers)
    size = numbers["parameters"] / 1e6
    lines = [
        (
            f"{state.step} steps over {state.samples} samples ({data.num_train} distinct) in "
            f"{seconds_text(state.seconds)}; {size:.1f} M trainable parameters"
        ),
        choice(best, tau),
    ]
    if state.skipped_steps:
        lines.append(f"{state.skipped_steps} steps had no finite gradient and changed nothing")
    lines += balance
    lines += [use.sentence() for use in memory]
    lines += remarks.facts
    # Those of the start stand in the log.
    lines += [f"warning: {sentence}" for sentence in warnings[len(remarks.warnings) :]]
    undone = left_out(state.set_aside)
    return Report(stage="train", numbers=numbers, lines=tuple(lines), undone=undone)


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
