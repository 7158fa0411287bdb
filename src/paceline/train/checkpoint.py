"""Checkpoints: a folder that appears whole or not at all, and proves itself when it is read."""

import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save

from paceline.drafter.checkpoint import CONFIG, SUMS, WEIGHTS, check_sums, save_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import IntegrityError, ShardDamaged
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.recipe.checkpoints import checkpoints
from paceline.recipe.fingerprint import digest_file
from paceline.train.rng import restore_rng, rng_state

OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
STATE = "state.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, RNG, STATE)
"""Of a checkpoint, beside their checksums."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a training stands; with the recipe it determines everything that follows."""

    fingerprint: str
    """Of the training stage; a checkpoint of another one is never resumed."""
    step: int
    """Optimizer steps done, skipped ones included."""
    samples: int
    """Samples consumed, over all epochs; the position in the order."""
    bad_steps: int
    """Steps in a row that changed nothing: not finite, or without a gradient."""
    skipped_steps: int
    """Such steps in all."""
    skipped_samples: int
    """Samples of such steps; they are consumed and do not advance the learning rate."""
    tokens: int
    """Context tokens trained on."""
    seconds: float
    """Time spent training."""
    tau: dict[str, float] = field(default_factory=dict)
    """Simulated τ of the evaluation that belongs to this checkpoint, by method."""
    first_tau: dict[str, float] = field(default_factory=dict)
    """The same before the first step."""
    labels: int = 0
    """Drafted tokens that had a loss, over all steps, skipped ones included."""
    software: dict[str, str] = field(default_factory=dict)
    """What was running."""


@dataclass(frozen=True, kw_only=True)
class _StateFile:
    """What STATE holds."""

    state: TrainState
    optimizer: list[dict[str, Any]]
    """Numbers of each group of parameters."""


def step_folder(root: Path, step: int) -> Path:
    """`step_000600`."""
    return root / f"step_{step:06d}"


def save_checkpoint(
    root: Path,
    drafter: DFlash,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    *,
    fs: FileSystem = REAL_FS,
) -> Path:
    """Write a checkpoint under a temporary name, make it durable, rename it."""
    final = step_folder(root, state.step)
    partial = final.with_name(final.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    save_drafter(drafter, partial)
    tensors, numbers = _flatten_optimizer(optimizer)
    write_atomic(partial / OPTIMIZER, save(tensors), fs=fs)
    write_atomic(partial / RNG, save(rng_state(drafter.fc.weight.device)), fs=fs)
    record = _StateFile(state=state, optimizer=numbers)
    write_atomic(partial / STATE, msgspec.json.format(msgspec.json.encode(record)), fs=fs)
    sums = {name: digest_file(partial / name) for name in FILES}
    write_atomic(partial / SUMS, msgspec.json.encode(sums), fs=fs)
    if final.exists():
        shutil.rmtree(final)
    fs.replace(partial, final)
    fs.sync_dir(root)
    return final


def verify_checkpoint(folder: Path) -> None:
    """Raise ShardDamaged, naming the file, unless every file is as this version wrote it."""
    check_sums(folder, FILES)
    _read_state_file(folder)


def read_state(folder: Path) -> TrainState:
    """The state in a verified checkpoint."""
    return _read_state_file(folder).state


def newest_checkpoint(root: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint whose checksums hold, and why newer ones were passed over."""
    passed_over = []
    for folder in reversed(checkpoints(root)):
        problem = damage(folder)
        if not problem:
            return folder, tuple(passed_over)
        passed_over.append(problem)
    return None, tuple(passed_over)


def intact_checkpoints(root: Path, *, verified: Path | None = None) -> list[Path]:
    """The checkpoints whose checksums hold, oldest first; that of `verified` is not looked at."""
    return [folder for folder in checkpoints(root) if folder == verified or not damage(folder)]


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, its file named; empty where it is whole."""
    try:
        verify_checkpoint(folder)
    except IntegrityError as error:
        return str(error)
    return ""


def remove_leftovers(root: Path) -> None:
    """Remove what a killed run was writing, or removing, when it died."""
    for folder in root.glob("step_*.partial"):
        shutil.rmtree(folder)


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's state of a verified checkpoint."""
    tensors = load((folder / OPTIMIZER).read_bytes())
    numbers = _read_state_file(folder).optimizer
    current = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = [group | saved for group, saved in zip(current["param_groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def restore_random(folder: Path, device: torch.device) -> None:
    """Set torch's generators as they were when a verified checkpoint was written."""
    restore_rng(load((folder / RNG).read_bytes()), device)


def _read_state_file(folder: Path) -> _StateFile:
    path = folder / STATE
    try:
        plain = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = msgspec.convert(plain, _StateFile)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ShardDamaged(
            f"{path}: not the state of a checkpoint of this version ({error})."
        ) from error
    surplus = {*plain} - {"state", "optimizer"}
    surplus |= {*plain["state"]} - {f.name for f in fields(TrainState)}
    if surplus:
        raise ShardDamaged(
            f"{path}: not the state of a checkpoint of this version ({', '.join(sorted(surplus))} "
            "is unknown)."
        )
    return found


def _flatten_optimizer(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    saved = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value.detach().contiguous()
        for index, entry in saved["state"].items()
        for name, value in entry.items()
    }
    return tensors, [{"lr": group["lr"]} for group in saved["param_groups"]]
