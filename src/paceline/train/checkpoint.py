"""Checkpoints: a folder that appears whole or not at all, and proves itself when it is read."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save

from paceline.drafter.checkpoint import CONFIG, WEIGHTS, save_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import IntegrityError, ShardDamaged
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.recipe.fingerprint import digest_file

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
SUMS = "checksums.json"
_FOLDERS = "step_*[0-9]"


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
    """Non-finite steps in a row."""
    skipped_steps: int
    """Non-finite steps in all."""
    tokens: int
    """Context tokens trained on."""
    seconds: float
    """Time spent training."""
    tau: dict[str, float] = field(default_factory=dict)
    """Simulated τ of the evaluation that belongs to this checkpoint, by method."""
    software: dict[str, str] = field(default_factory=dict)
    """What was running."""


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
    record = {"state": state, "optimizer": numbers}
    write_atomic(partial / STATE, msgspec.json.format(msgspec.json.encode(record)), fs=fs)
    sums = {name: digest_file(partial / name) for name in (WEIGHTS, CONFIG, OPTIMIZER, STATE)}
    write_atomic(partial / SUMS, msgspec.json.encode(sums), fs=fs)
    if final.exists():
        shutil.rmtree(final)
    fs.replace(partial, final)
    fs.sync_dir(root)
    return final


def verify_checkpoint(folder: Path) -> None:
    """Raise ShardDamaged, naming the file, unless every file is as it was written."""
    try:
        sums = msgspec.json.decode((folder / SUMS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ShardDamaged(f"{folder / SUMS}: cannot be read ({error}).") from error
    for name in (WEIGHTS, CONFIG, OPTIMIZER, STATE):
        path = folder / name
        if not path.is_file():
            raise ShardDamaged(f"{path}: missing from the checkpoint.")
        if digest_file(path) != sums.get(name):
            raise ShardDamaged(f"{path}: its checksum does not hold.")


def read_state(folder: Path) -> TrainState:
    """The state in a verified checkpoint."""
    record = msgspec.json.decode((folder / STATE).read_bytes())
    return msgspec.convert(record["state"], TrainState)


def newest_checkpoint(root: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint whose checksums hold, and why newer ones were passed over."""
    passed_over = []
    for folder in sorted(root.glob(_FOLDERS), reverse=True):
        damage = _damage(folder)
        if not damage:
            return folder, tuple(passed_over)
        passed_over.append(damage)
    return None, tuple(passed_over)


def intact_checkpoints(root: Path) -> list[Path]:
    """The checkpoints whose checksums hold, oldest first."""
    return [folder for folder in sorted(root.glob(_FOLDERS)) if not _damage(folder)]


def remove_leftovers(root: Path) -> None:
    """Remove what a killed run was writing, or removing, when it died."""
    for folder in root.glob("step_*.partial"):
        shutil.rmtree(folder)


def _damage(folder: Path) -> str:
    try:
        verify_checkpoint(folder)
    except IntegrityError as error:
        return str(error)
    return ""


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's state of a verified checkpoint."""
    tensors = load((folder / OPTIMIZER).read_bytes())
    numbers: dict[str, Any] = msgspec.json.decode((folder / STATE).read_bytes())["optimizer"]
    current = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = [group | saved for group, saved in zip(current["param_groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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
