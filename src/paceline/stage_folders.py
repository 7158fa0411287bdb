"""What the stages keep in their folders, each of which may be a link to another mount."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.errors import PacelineError
from paceline.durable.limit import Call
from paceline.recipe.checkpoints import Checkpoint, list_checkpoints
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import Record, read_record

_REDONE = "The stage makes it anew when it is run again."


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one stage keeps."""

    record: Record | None = None
    damage: str = ""
    """What is wrong with the record or the outputs that it lists; empty where nothing is."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Of a training."""
    silence: str = ""
    """That the folder has not answered, in a sentence; then nothing of the others is known."""

    @property
    def is_complete(self) -> bool:
        """Whether the record says that the stage came to its end."""
        return self.record is not None and self.record.outputs is not None


def folder_of(name: str, paths: RunDir) -> Path:
    """Where a stage keeps its record and artefacts."""
    match name:
        case "extract":
            return paths.features
        case "train":
            return paths.checkpoints
        case "score":
            return paths.score
        case _:
            return paths.corpus


def look_at_folders(names: Sequence[str], paths: RunDir, *, seconds: float) -> dict[str, Kept]:
    """Look at the folders of these stages, side by side; who has not answered then is silent.

    A thread whose read never returns is left behind, and its process with it where the kernel
    holds that: the caller is one that nobody waits for.
    """
    deadline = time.monotonic() + seconds
    calls = {name: Call(lambda name=name: _look(name, paths), name) for name in names}
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call.result(deadline - time.monotonic())
        except TimeoutError:
            found[name] = Kept(
                silence=f"{folder_of(name, paths)} does not answer: a read there has not come back "
                f"for {seconds:g} s, as on a mount that is frozen. What is said here is from the "
                "events alone."
            )
    return found


def _look(name: str, paths: RunDir) -> Kept:
    record, damage = _record(name, folder_of(name, paths))
    checkpoints = list_checkpoints(paths.checkpoints) if name == "train" else ()
    return Kept(record=record, damage=damage, checkpoints=checkpoints)


def _record(name: str, folder: Path) -> tuple[Record | None, str]:
    """The record, and what is wrong with it or the outputs that it lists."""
    try:
        record = read_record(folder, name)
    except PacelineError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{folder / f'{name}.stage.json'}: cannot be read ({error.strerror})."
    for output, digest in ((record.outputs if record else None) or {}).items():
        path = folder / output
        try:
            size = path.stat().st_size
        except OSError as error:
            return record, f"{path}: {error.strerror}. {_REDONE}"
        if str(size) != digest.rpartition("-")[2]:
            return record, f"{path}: {size:,} bytes, not as many as were written. {_REDONE}"
    return record, ""
