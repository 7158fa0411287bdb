"""Checkpoint folders without torch: which there are, and which of them is the best."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic

_NAME = re.compile(r"step_\d+")

SUMS = "checksums.json"
"""Beside the files of a checkpoint: file name to size and CRC64NVME."""
EVALUATION = "evaluation.json"
"""In a checkpoint whose evaluation is done: written after it, so not among its checksums."""

CHOOSING = "ddtree-64"
"""The method whose τ chooses the best checkpoint (docs/algorithms.md, "Choosing a checkpoint")."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What EVALUATION holds."""

    tau: dict[str, float]
    """Simulated τ by method; empty where there was nothing to measure with."""
    number: int
    """Which of the training's evaluations it was, from 1."""
    checkpoint: str
    """CRC64NVME of the checkpoint's list of checksums: another's evaluation is none of it."""
    checksum: str = ""
    """CRC64NVME of all the above."""


def write_evaluation(
    folder: Path, tau: dict[str, float], number: int, *, fs: FileSystem = REAL_FS
) -> None:
    """Add the evaluation to a checkpoint that is written. Raises OSError where it is gone."""
    found = Evaluation(tau=tau, number=number, checkpoint=_digest_sums(folder))
    found = replace(found, checksum=_checksum(found))
    write_atomic(folder / EVALUATION, msgspec.json.format(msgspec.json.encode(found)), fs=fs)


def read_evaluation(folder: Path) -> Evaluation | None:
    """The checkpoint's evaluation; None where it has none, or a damaged one, or another's."""
    try:
        found = msgspec.json.decode((folder / EVALUATION).read_bytes(), type=Evaluation)
        is_own = found.checkpoint == _digest_sums(folder)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return found if is_own and found.checksum == _checksum(found) else None


def _digest_sums(folder: Path) -> str:
    return crc64_hex(crc64((folder / SUMS).read_bytes()))


def _checksum(found: Evaluation) -> str:
    plain = msgspec.json.encode(replace(found, checksum=""), order="deterministic")
    return crc64_hex(crc64(plain))


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The checkpoint of another run that a training began with."""

    run: str
    """Absolute path of that run."""
    name: str
    """Of the checkpoint's folder."""
    step: int
    fingerprint: str
    """Of the training that wrote it."""

    def words(self) -> str:
        """Such as `forked from /runs/old, step_000600`."""
        return f"forked from {self.run}, {self.name}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's folder, by what its files say; its checksums are not looked at."""

    name: str
    """Of the folder, such as `step_000600`."""
    step: int
    """Optimizer steps done; -1 where its state file cannot be read."""
    fingerprint: str = ""
    """Of the training that wrote it."""
    tau: dict[str, float] = field(default_factory=dict)
    """Simulated τ by method; empty where none was measured with it."""
    parent: Parent | None = None
    """Where the training came from, if it is a fork."""


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
        found = msgspec.convert(record["state"] | {"name": folder.name}, Checkpoint)
    except (OSError, LookupError, TypeError, msgspec.MsgspecError, UnicodeError):
        return Checkpoint(name=folder.name, step=-1)
    evaluation = read_evaluation(folder)
    # Checkpoints of earlier releases have τ in their state.
    return found if evaluation is None else replace(found, tau=evaluation.tau)
