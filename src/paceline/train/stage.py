"""`paceline train`: the drafter, trained on the stored features."""

import hashlib
import logging
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import paceline
from paceline.drafter.build import choose_mask_token, drafter_config, new_drafter
from paceline.drafter.checkpoint import CONFIG, WEIGHTS, load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import DataError, RecipeChanged
from paceline.features.reader import FeatureReader
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Report, StageRecord
from paceline.target.head import TargetHead
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.template import special_token_ids, template_digest
from paceline.train.checkpoint import (
    TrainState,
    intact_checkpoints,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    restore_optimizer,
)
from paceline.train.evaluate import CHOOSING
from paceline.train.loop import TrainData, Trainer
from paceline.types.sample import Split, read_samples
from paceline.watch.events import EventWriter
from paceline.watch.progress import seconds_text

_LOG = logging.getLogger(__name__)

FORMAT_VERSION = 1

_WITHOUT_EFFECT = ("device", "threads", "keep_checkpoints")
"""Train fields that change where and how fast, not what is computed."""


def run(recipe: Recipe, run_dir: RunDir) -> Report:
    """Train to the end, or go on from the newest checkpoint whose checksums hold.

    Raises RecipeChanged where the checkpoints of another recipe stand in the run directory,
    DataError where there is nothing to train on.
    """
    reader = FeatureReader(run_dir.features)
    spec = read_spec(Path(recipe.target.path))
    if reader.manifest.target_identity != spec.identity:
        raise RecipeChanged(
            f"{run_dir.features}: the features are those of another target (identity "
            f"{reader.manifest.target_identity}) than {recipe.target.path} ({spec.identity}). Put "
            "that target back, or use a new run directory (`--run DIR`)."
        )
    record = StageRecord(run_dir.checkpoints, "train", _fields(recipe, reader, spec))
    if record.is_done():
        drafter = run_dir.checkpoints / record.report["best"]
        return Report(
            stage="train", skipped=True, numbers=record.report, lines=(f"drafter: {drafter}",)
        )
    record.begin()
    with EventWriter(run_dir.events, "train") as events:
        return _train(recipe, run_dir, reader, spec, record, events)


def _train(
    recipe: Recipe,
    run_dir: RunDir,
    reader: FeatureReader,
    spec: TargetSpec,
    record: StageRecord,
    events: EventWriter,
) -> Report:
    torch.set_num_threads(recipe.train.threads)
    device = recipe.train.device
    data, used = _data(recipe, run_dir, reader)
    remove_leftovers(run_dir.checkpoints)
    newest, passed_over = newest_checkpoint(run_dir.checkpoints)
    for reason in passed_over:
        _LOG.warning("passed over: %s", reason)
    state = _fresh_state(record.fingerprint)
    if newest is not None:
        state = read_state(newest)
        _refuse_foreign(newest, state, record.fingerprint)
        drafter = load_drafter(newest, device=device)
        _tell_drift(state.software)
    else:
        drafter = _new_drafter(recipe, reader, spec, used).to(device)
    head = TargetHead.load(
        Path(recipe.target.path), dtype=drafter.fc.weight.dtype, device=torch.device(device)
    )
    trainer = Trainer(
        recipe.train,
        data,
        drafter,
        head,
        state,
        checkpoints=run_dir.checkpoints,
        events=events,
    )
    if newest is not None:
        restore_optimizer(newest, trainer.optimizer)
        _LOG.info("going on from %s (%d samples done)", newest.name, state.samples)
    events.emit("start", samples=len(data.train), validation=len(data.validation), step=state.step)
    for _ in trainer.run():
        _prune(run_dir.checkpoints, recipe.train.keep_checkpoints)
    return _finish(run_dir, trainer.state, record, events, data, drafter)


def _finish(
    run_dir: RunDir,
    state: TrainState,
    record: StageRecord,
    events: EventWriter,
    data: TrainData,
    drafter: DFlash,
) -> Report:
    best = best_checkpoint(run_dir.checkpoints)
    tau = read_state(best).tau
    numbers: dict[str, Any] = {
        "best": best.name,
        "simulated_tau": tau,
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "samples": state.samples,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "parameters": sum(p.numel() for p in drafter.parameters()),
    }
    events.emit("finished", **numbers)
    record.finish([best / WEIGHTS, best / CONFIG], numbers)
    shown = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
    size = numbers["parameters"] / 1e6
    lines = [
        (
            f"{state.step} steps over {state.samples} samples ({len(data.train)} distinct) in "
            f"{seconds_text(state.seconds)}; {size:.1f} M trainable parameters"
        ),
        f"drafter: {best}" + (f", simulated τ {shown}" if shown else ""),
    ]
    if state.skipped_steps:
        lines.append(f"{state.skipped_steps} steps were not finite and changed nothing")
    return Report(stage="train", numbers=numbers, lines=tuple(lines))


def best_checkpoint(root: Path) -> Path:
    """The checkpoint of highest simulated τ; of equal ones, or without any, the newest."""
    folders = intact_checkpoints(root)
    if not folders:
        raise DataError(f"{root}: no intact checkpoint. Run `paceline train` again.")
    return max(folders, key=lambda f: (read_state(f).tau.get(CHOOSING, 0.0), f.name))


def _prune(root: Path, keep: int) -> None:
    best = best_checkpoint(root)
    for folder in intact_checkpoints(root)[:-keep]:
        if folder != best:
            # Renamed first: a folder that is being removed must not look like a checkpoint.
            doomed = folder.with_name(folder.name + ".partial")
            folder.rename(doomed)
            shutil.rmtree(doomed)


def _refuse_foreign(folder: Path, state: TrainState, fingerprint: str) -> None:
    if state.fingerprint != fingerprint:
        raise RecipeChanged(
            f"{folder}: a checkpoint of another recipe or of other features. Use a new run "
            "directory (`--run DIR`), or remove the checkpoints to train anew."
        )


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
        root=run_dir.features,
        digest=reader.digest,
        train=tuple(by_split[Split.TRAIN]),
        validation=tuple(
            _spread(by_split[Split.VALIDATION], recipe.train.eval_samples, reader.sample_ids)
        ),
        tokens=reader.lengths,
    )
    return data, used


def _spread(indices: Sequence[int], count: int, ids: Sequence[str]) -> list[int]:
    """`count` of the indices, chosen by id: the store's order is by length."""
    return sorted(sorted(indices, key=lambda i: ids[i])[:count])


def _new_drafter(recipe: Recipe, reader: FeatureReader, spec: TargetSpec, used: set[int]) -> DFlash:
    path = Path(recipe.target.path)
    mask = choose_mask_token(
        recipe.drafter.mask_token_id, spec, special_ids=special_token_ids(path), used=used
    )
    config = drafter_config(
        recipe.drafter,
        spec,
        reader.manifest.layer_ids,
        mask_token_id=mask,
        template_digest=template_digest(path),
        template_args=recipe.corpus.template_args,
    )
    return new_drafter(config, recipe.drafter, spec, path, seed=recipe.train.seed)


def _fields(recipe: Recipe, reader: FeatureReader, spec: TargetSpec) -> Fields:
    train = {k: v for k, v in asdict(recipe.train).items() if k not in _WITHOUT_EFFECT}
    return flatten(
        {
            "format": FORMAT_VERSION,
            "features": reader.digest,
            "target": spec.identity,
            "drafter": asdict(recipe.drafter),
            "template_args": recipe.corpus.template_args,
            "train": train,
        }
    )


def _fresh_state(fingerprint: str) -> TrainState:
    return TrainState(
        fingerprint=fingerprint,
        step=0,
        samples=0,
        bad_steps=0,
        skipped_steps=0,
        tokens=0,
        seconds=0.0,
        software=_software(),
    )


def _software() -> dict[str, str]:
    return {
        "paceline": paceline.__version__,
        "source": _source_hash(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _source_hash() -> str:
    """Of the package's own code: versions do not tell one edit from another."""
    digest = hashlib.sha256()
    root = Path(paceline.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _tell_drift(saved: dict[str, str]) -> None:
    for name, value in _software().items():
        if saved.get(name) != value:
            _LOG.warning("%s was %s when this training began, now %s", name, saved.get(name), value)
