"""Where a training goes on from: the newest checkpoint that is whole, or the one asked for."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from paceline.drafter.checkpoint import read_sums
from paceline.durable.errors import RecipeChanged, ShardDamaged, UserError
from paceline.durable.fs import REAL_FS, write_atomic
from paceline.recipe.checkpoints import EVALUATION, SUMS, checkpoints, read_evaluation, step_of
from paceline.recipe.fingerprint import ABSENT, Fields, difference, fingerprint
from paceline.recipe.stage import Record, read_record
from paceline.train.checkpoint import (
    read_state,
    step_folder,
    verify_checkpoint,
)

_LOG = logging.getLogger(__name__)


def find_checkpoint(root: Path, asked: str) -> Path:
    """The folder that `--resume-from` names: a path, or a name below `root`.

    Raises UserError where there is none.
    """
    folder = root / asked if (root / asked).is_dir() else Path(asked).expanduser()
    if not folder.is_dir():
        names = ", ".join(f.name for f in checkpoints(root)) or "none"
        raise UserError(
            f"--resume-from {asked}: no such folder, here or in {root}. Checkpoints there: {names}."
        )
    return folder


def chosen_checkpoint(root: Path, asked: str) -> Path:
    """As `find_checkpoint`; raises ShardDamaged where a file of it is not as it was written."""
    folder = find_checkpoint(root, asked)
    try:
        verify_checkpoint(folder)
    except ShardDamaged as error:
        raise ShardDamaged(
            f"--resume-from {asked}: {error} Name another, or leave the flag out to go on from "
            "the newest that is whole."
        ) from error
    return folder


def refuse_foreign(folder: Path, fingerprints: Collection[str], fields: Fields) -> None:
    """Raise RecipeChanged where a verified checkpoint carries none of these fingerprints.

    `fields` are those of the training that is asked for.
    """
    if read_state(folder).fingerprint in fingerprints:
        return
    made = training_of(folder)
    rows = difference(made.fields, fields) if made else []
    diff = "".join(f"\n  {row}" for row in rows)
    raise RecipeChanged(
        f"{folder}: a checkpoint of another training: of another recipe, or of other features"
        f"{f' (made -> asked):{diff}' if diff else '.'}\n"
        "Use a new run directory (`--run DIR`), or remove the checkpoints to train anew. To begin "
        "a new run with it: `--fork-from`."
    )


def training_of(folder: Path) -> Record | None:
    """The record of the training that wrote a verified checkpoint, as it stood then.

    None where it does not lie beside the checkpoint. Raises IntegrityError where it is damaged.
    """
    record, wanted = read_record(folder.parent, "train"), read_state(folder).fingerprint
    if record is None:
        return None
    fields, overrides = dict(record.fields), list(record.overrides)
    while fingerprint(fields) != wanted:
        if not overrides:
            return None
        last = overrides.pop()
        fields.pop(last.key, None)
        if last.made != ABSENT:
            fields[last.key] = last.made
    return replace(record, fingerprint=wanted, fields=fields, overrides=tuple(overrides))


def make_newest(root: Path, folder: Path) -> Path:
    """Let a verified checkpoint be the newest below `root`; returns where it stands then.

    Newer ones are renamed, not removed; one from elsewhere, or set aside before, is copied.
    """
    step = read_state(folder).step
    place = step_folder(root, step)
    is_here = place.exists() and folder.samefile(place)
    for other in reversed(checkpoints(root)):
        if step_of(other) > step or (step_of(other) == step and not is_here):
            aside = _free_name(other)
            other.rename(aside)
            _LOG.warning("%s is set aside as %s: remove it when you like", other.name, aside.name)
    if not is_here:
        partial = place.with_name(f"{place.name}.partial")
        evaluation = (EVALUATION,) if read_evaluation(folder) else ()
        for name in (*read_sums(folder), SUMS, *evaluation):
            write_atomic(partial / name, (folder / name).read_bytes())
        verify_checkpoint(partial)
        partial.replace(place)
    REAL_FS.sync_dir(root)
    return place


def _free_name(folder: Path) -> Path:
    """Such as `step_000014.aside`: no name of a checkpoint."""
    number, aside = 1, folder.with_name(f"{folder.name}.aside")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{number}.aside")
    return aside
