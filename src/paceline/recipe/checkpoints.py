"""Checkpoint folders without torch: which there are, and which of them is the best."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

_NAME = re.compile(r"step_\d+")

CHOOSING = "ddtree-64"
"""The method whose τ chooses the best checkpoint (docs/algorithms.md, "Choosing a checkpoint")."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's folder, by what its state file says; its checksums are not looked at."""

    name: str
    """Of the folder, such as `step_000600`."""
    step: int
    """Optimizer steps done; -1 where its state file cannot be read."""
    fingerprint: str = ""
    """Of the training that wrote it."""
    tau: dict[str, float] = field(default_factory=dict)
    """Simulated τ by method; empty where none was measured with it."""


def checkpoints(root: Path) -> list[Path]:
    """Every checkpoint's folder, whole or not, oldest first; none where there is no such folder."""
    named = (f for f in root.glob("step_*") if _NAME.fullmatch(f.name) and f.is_dir())
    return sorted(named, key=step_of)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(root: Path) -> tuple[Checkpoint, ...]:
    """The checkpoints in a folder, oldest first."""
    return tuple(_read(folder) for folder in checkpoints(root))


def rank(folder: Path, tau: dict[str, float]) -> tuple[float, int]:
    """Sort key of a checkpoint: the best has the highest τ, and of equal ones is the newest."""
    return tau.get(CHOOSING, 0.0), step_of(folder)


def _read(folder: Path) -> Checkpoint:
    try:
        record: dict[str, Any] = msgspec.json.decode((folder / "state.json").read_bytes())
        return msgspec.convert(record["state"] | {"name": folder.name}, Checkpoint)
    except (OSError, LookupError, TypeError, msgspec.MsgspecError, UnicodeError):
        return Checkpoint(name=folder.name, step=-1)
