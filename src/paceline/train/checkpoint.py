"""Checkpoints: a folder that appears whole or not at all, and proves itself when it is read."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save

import paceline
from paceline.drafter.checkpoint import CONFIG, WEIGHTS, check_sums, read_sums, save_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import IntegrityError, ShardDamaged, UserError
from paceline.durable.fs import REAL_FS, FileSystem, remove_dead_partials, write_atomic
from paceline.recipe.checkpoints import SUMS, Parent, checkpoints, read_evaluation
from paceline.recipe.fingerprint import digest_file
from paceline.train.rng import restore_rng, rng_state

OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
STATE = "state.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, RNG, STATE)
"""Of a checkpoint, beside their checksums and its evaluation."""


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
    """Simulated τ of the evaluation that belongs to this checkpoint, by method. It stands in a
    file of its own; only earlier releases wrote it into the state's."""
    first_tau: dict[str, float] = field(default_factory=dict)
    """The same before the first step."""
    labels: int = 0
    """Drafted tokens that had a loss, over all steps, skipped ones included."""
    software: dict[str, str] = field(default_factory=dict)
    """What was running."""
    is_due: bool = False
    """Whether an evaluation belongs to this checkpoint."""
    owed: tuple[int, ...] = ()
    """Positions before the furthest one consumed that are not consumed themselves: they were
    under way, or lost with a worker, when this was written."""
    set_aside: int = 0
    """Samples consumed without a step: no worker could make their features."""
    drafters: int = 1
    """How many drafters' own optimizers and generators the checkpoint holds."""
    tracker: str = ""
    """The run's id at trackers; empty where none was asked for."""
    parent: Parent | None = None
    """The checkpoint of another run that this training began with."""


@dataclass(frozen=True, kw_only=True)
class _StateFile:
    """What STATE holds."""

    state: TrainState
    optimizer: list[dict[str, Any]]
    """Numbers of each group of parameters."""
    written_by: str = ""
    """Version of Paceline; empty where an early one wrote it."""


def fresh_state(fingerprint: str, software: dict[str, str] | None = None) -> TrainState:
    """Before the first step."""
    return TrainState(
        fingerprint=fingerprint,
        step=0,
        samples=0,
        bad_steps=0,
        skipped_steps=0,
        skipped_samples=0,
        tokens=0,
        seconds=0.0,
        software=software or {},
    )


class NewerCheckpoint(UserError):
    """A checkpoint that is whole and holds what only a newer version understands.

    To fall back to an older one would throw its steps away without need.
    """


def own_file(name: str, number: int | str) -> str:
    """The file of drafter `number` where a checkpoint has one for each; the first has `name`."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_{number}.{suffix}" if number else name


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
    tensors, numbers = optimizer_tensors(optimizer)
    write_atomic(partial / OPTIMIZER, save(tensors), fs=fs)
    write_atomic(partial / RNG, save(rng_state(drafter.fc.weight.device)), fs=fs)
    write_state(partial, state, numbers, FILES, fs)
    if final.exists():
        shutil.rmtree(final)
    fs.replace(partial, final)
    fs.sync_dir(root)
    return final


def copy_as_first(folder: Path, root: Path, state: TrainState, *, fs: FileSystem = REAL_FS) -> Path:
    """A copy of a checkpoint with another state, below a `root` that has none; never half there.

    Raises ShardDamaged where a file of it is not, or no more, as it was written.
    """
    final = step_folder(root, state.step)
    partial = final.with_name(final.name + ".partial")
    sums = read_sums(folder)
    for name in (*sums, SUMS):
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise ShardDamaged(f"{folder / name}: cannot be read ({error}).") from error
        write_atomic(partial / name, data, fs=fs)
    verify_checkpoint(partial)
    write_state(partial, state, _read_state_file(partial).optimizer, sums, fs)
    fs.replace(partial, final)
    fs.sync_dir(root)
    return final


def write_state(
    partial: Path,
    state: TrainState,
    optimizer: list[dict[str, Any]],
    names: Iterable[str],
    fs: FileSystem,
) -> None:
    """The state, and the checksums of all `names`."""
    record = _StateFile(state=state, optimizer=optimizer, written_by=paceline.__version__)
    write_atomic(partial / STATE, msgspec.json.format(msgspec.json.encode(record)), fs=fs)
    sums = {name: digest_file(partial / name) for name in names}
    write_atomic(partial / SUMS, msgspec.json.encode(sums), fs=fs)


def verify_checkpoint(folder: Path) -> None:
    """Raise ShardDamaged, naming the file, unless every file is as this version wrote it.

    Raises NewerCheckpoint where a newer one wrote it.
    """
    check_sums(folder, {*FILES, *read_sums(folder)})
    _read_state_file(folder)


def read_state(folder: Path) -> TrainState:
    """The state in a verified checkpoint, with the τ of its evaluation."""
    state = _read_state_file(folder).state
    evaluation = read_evaluation(folder)
    return state if evaluation is None else replace(state, tau=evaluation.tau)


def newest_checkpoint(root: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint whose checksums hold, and why newer ones were passed over.

    Raises NewerCheckpoint where that is of a newer version.
    """
    passed_over = []
    for folder in reversed(checkpoints(root)):
        try:
            verify_checkpoint(folder)
        except IntegrityError as error:
            passed_over.append(str(error))
        else:
            return folder, tuple(passed_over)
    return None, tuple(passed_over)


def intact_checkpoints(root: Path, *, verified: Path | None = None) -> list[Path]:
    """The checkpoints whose checksums hold, oldest first; that of `verified` is not looked at."""
    return [folder for folder in checkpoints(root) if folder == verified or not damage(folder)]


def damage(folder: Path) -> str:
    """Why a checkpoint cannot be used, its file named; empty where it can."""
    try:
        verify_checkpoint(folder)
    except (IntegrityError, NewerCheckpoint) as error:
        return str(error)
    return ""


def remove_leftovers(root: Path) -> None:
    """Remove what a killed run was writing, or removing, when it died."""
    for folder in root.glob("step_*.partial"):
        shutil.rmtree(folder)
    for folder in checkpoints(root):
        remove_dead_partials(folder)


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """Load the state of drafter `number`'s optimizer from a verified checkpoint."""
    tensors = load((folder / own_file(OPTIMIZER, number)).read_bytes())
    numbers = _read_state_file(folder).optimizer
    current = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = [group | saved for group, saved in zip(current["param_groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def restore_random(folder: Path, device: torch.device, number: int = 0) -> None:
    """Set torch's generators as those of drafter `number` in a verified checkpoint."""
    restore_rng(load((folder / own_file(RNG, number)).read_bytes()), device)


def _read_state_file(folder: Path) -> _StateFile:
    path = folder / STATE
    try:
        plain = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        _refuse_newer(path, plain)
        return msgspec.convert(plain, _StateFile)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ShardDamaged(
            f"{path}: not the state of a checkpoint of this version ({error})."
        ) from error


def _refuse_newer(path: Path, plain: dict[str, Any]) -> None:
    """Whatever changes what a checkpoint means comes with a key: one that is unknown is newer."""
    state = plain.get("state")
    unknown = {*plain} - {f.name for f in fields(_StateFile)}
    if isinstance(state, dict):
        unknown |= {*state} - {f.name for f in fields(TrainState)}
    if unknown:
        version = plain.get("written_by")
        raise NewerCheckpoint(
            f"{path}: written by a newer Paceline{f' ({version})' if version else ''} than this "
            f"one ({paceline.__version__}), which does not know {', '.join(sorted(unknown))}. Go "
            "on with that one, or take an older checkpoint with `--resume-from`."
        )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """An optimizer's state as named tensors, and the numbers of each group of parameters."""
    saved = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value.detach().contiguous()
        for index, entry in saved["state"].items()
        for name, value in entry.items()
    }
    return tensors, [{"lr": group["lr"]} for group in saved["param_groups"]]
