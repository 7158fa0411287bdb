"""Checkpoints of several drafters.

What each drafter has is durable before anything of it is averaged: it stands in a folder
`step_000600.unaveraged`, whole and checksummed. The average completes it, and only then does it get
a checkpoint's name; whoever resumes completes what was left so.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save

from paceline.drafter.checkpoint import (
    CONFIG,
    WEIGHTS,
    check_sums,
    load_drafter,
    read_sums,
    save_drafter,
)
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import IntegrityError
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.recipe.checkpoints import SUMS
from paceline.recipe.fingerprint import digest_file
from paceline.train.averaging import Outer, Share
from paceline.train.checkpoint import (
    FILES,
    OPTIMIZER,
    RNG,
    STATE,
    TrainState,
    own_file,
    read_state,
    step_folder,
    write_state,
)

_LOG = logging.getLogger(__name__)

SUFFIX = ".unaveraged"
_SHARES = "shares.json"
VELOCITY = "outer.safetensors"
"""Of the outer optimizer."""
_BEFORE = "before"
"""Folder of the model that the drafters began from, which the average moves."""


@dataclass(frozen=True)
class _Shares:
    """What the average takes of each drafter's weights, by its number."""

    tokens: dict[int, int]
    rate: float
    momentum: float


def _own(number: int | str) -> str:
    """The file of a drafter's own weights."""
    return f"own_{number}.safetensors"


def begin_unaveraged(root: Path, step: int) -> Path:
    """An empty folder for what each drafter has."""
    partial = root / f"{step_folder(root, step).name}{SUFFIX}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def seal_unaveraged(
    partial: Path,
    model: DFlash,
    state: TrainState,
    groups: list[dict[str, Any]],
    shares: Mapping[int, Share],
    outer: Outer,
    *,
    fs: FileSystem = REAL_FS,
) -> Path:
    """Write all else into `partial`, where each drafter has put its own; then it counts.

    `model` is what the drafters began from, `groups` are the numbers of the optimizer's groups.
    """
    save_drafter(model, partial / _BEFORE)
    write_atomic(partial / CONFIG, (partial / _BEFORE / CONFIG).read_bytes(), fs=fs)
    for number, share in shares.items():
        own = {name: tensor.contiguous() for name, tensor in share.weights.items()}
        write_atomic(partial / _own(number), save(own), fs=fs)
    if outer.velocity:
        # Not where the average puts its own: this one has to stay until that is sealed.
        write_atomic(partial / _BEFORE / VELOCITY, save(outer.velocity), fs=fs)
    told = _Shares({n: share.tokens for n, share in shares.items()}, outer.rate, outer.momentum)
    write_atomic(partial / _SHARES, msgspec.json.encode(told), fs=fs)
    files = [str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file()]
    write_state(partial, state, groups, [*files, STATE], fs)
    final = partial.with_name(partial.name.removesuffix(".partial"))
    if final.exists():
        shutil.rmtree(final)
    fs.replace(partial, final)
    fs.sync_dir(final.parent)
    return final


def complete(
    folder: Path, model: DFlash, outer: Outer, drafters: int, *, fs: FileSystem = REAL_FS
) -> Path:
    """Make a checkpoint of an unaveraged one, `model` being the average.

    At every moment the folder is whole as the one or as the other.
    """
    save_drafter(model, folder)
    if outer.velocity:
        write_atomic(folder / VELOCITY, save(outer.velocity), fs=fs)
    names = [*FILES, *(own_file(n, k) for n in (OPTIMIZER, RNG) for k in range(1, drafters))]
    _seal(folder, [*names, *([VELOCITY] if outer.velocity else [])], fs)
    return _named(folder, fs)


def save_alike(
    root: Path,
    model: DFlash,
    state: TrainState,
    write_own: Callable[[Path], list[dict[str, Any]]],
    *,
    fs: FileSystem = REAL_FS,
) -> Path:
    """A checkpoint of drafters that are all alike.

    `write_own(folder)` has one of them put optimizer and generators there.
    """
    final = step_folder(root, state.step)
    partial = final.with_name(final.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    groups = write_own(partial)
    save_drafter(model, partial)
    write_state(partial, state, groups, FILES, fs)
    if final.exists():
        shutil.rmtree(final)
    fs.replace(partial, final)
    fs.sync_dir(root)
    return final


def complete_what_was_left(root: Path) -> list[Path]:
    """Average what a training that ended in the middle of it had left; the checkpoints made so.

    What is not whole is left to `remove_leftovers`.
    """
    made = []
    for folder in sorted(root.glob(f"step_*{SUFFIX}")):
        try:
            made.append(_completed(folder))
        except IntegrityError as error:
            _LOG.warning("%s: not averaged, for it is not whole (%s)", folder, error)
            shutil.rmtree(folder)
    return made


def load_velocity(folder: Path) -> dict[str, torch.Tensor]:
    """Of the outer optimizer, in a verified checkpoint; empty where it has none."""
    path = folder / VELOCITY
    return load_file(path) if path.exists() else {}


def _completed(folder: Path) -> Path:
    sums = read_sums(folder)
    check_sums(folder, sums)
    state = read_state(folder)
    if WEIGHTS in sums:
        return _named(folder, REAL_FS)
    told = msgspec.json.decode((folder / _SHARES).read_bytes(), type=_Shares)
    model = load_drafter(folder / _BEFORE)
    outer = Outer(told.rate, told.momentum)
    outer.velocity = load_velocity(folder / _BEFORE)
    shares = [
        Share(load_file(folder / _own(number)), tokens) for number, tokens in told.tokens.items()
    ]
    outer.go(model, shares)
    return complete(folder, model, outer, state.drafters)


def _named(folder: Path, fs: FileSystem) -> Path:
    final = folder.with_name(folder.name.removesuffix(SUFFIX))
    if final.exists():
        shutil.rmtree(final)
    fs.replace(folder, final)
    fs.sync_dir(final.parent)
    shutil.rmtree(final / _BEFORE, ignore_errors=True)
    for path in [final / _SHARES, *final.glob(_own("*"))]:
        path.unlink(missing_ok=True)
    return final


def _seal(folder: Path, names: Iterable[str], fs: FileSystem) -> None:
    sums = {name: digest_file(folder / name) for name in names}
    write_atomic(folder / SUMS, msgspec.json.encode(sums), fs=fs)
