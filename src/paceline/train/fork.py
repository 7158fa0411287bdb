"""A new run that begins with a checkpoint of another one, which is only read."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.durable.errors import RecipeChanged, ShardDamaged, UserError
from paceline.recipe.checkpoints import Parent, list_checkpoints, read_evaluation, write_evaluation
from paceline.recipe.fingerprint import Fields, changed_fields, difference, keys_of
from paceline.recipe.stage import Record
from paceline.recipe.training import CHANGEABLE
from paceline.train.checkpoint import copy_as_first, read_state, verify_checkpoint
from paceline.train.resume import training_of


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A verified checkpoint of another run."""

    folder: Path
    parent: Parent
    made: Record
    """Of the training that wrote it, as it stood then."""

    def begin(self, root: Path, stage_fingerprint: str, *, keep_tau: bool) -> Path:
        """Copy it below `root`, as the first checkpoint of a training with this fingerprint.

        Its evaluation goes along where `keep_tau`. Raises ShardDamaged where it has changed since.
        """
        # Trackers get a run of its own.
        state = replace(
            read_state(self.folder),
            fingerprint=stage_fingerprint,
            parent=self.parent,
            tau={},
            tracker="",
        )
        evaluation = read_evaluation(self.folder)
        copy = copy_as_first(self.folder, root, state)
        if evaluation is not None and keep_tau:
            write_evaluation(copy, evaluation.tau, evaluation.number)
        return copy


def find_fork(root: Path, asked: str) -> Path | None:
    """The verified checkpoint that `--fork-from` names; None where `root` began with it already.

    Raises UserError where there is no such checkpoint, or `root` has others; ShardDamaged where it
    is not as it was written.
    """
    folder = Path(asked).expanduser().resolve()
    run, there = str(folder.parent.parent), list_checkpoints(root)
    if any(c.parent and (c.parent.run, c.parent.name) == (run, folder.name) for c in there):
        return None
    if folder.is_relative_to(root.resolve()):
        raise UserError(
            f"--fork-from {asked}: a checkpoint of this very run. Name another run directory "
            "(`--run DIR`), or take --resume-from to go on from it here."
        )
    if there:
        raise UserError(
            f"{root}: has checkpoints already, the last {there[-1].name}, and --fork-from begins a "
            "run. Use a new run directory (`--run DIR`), or leave the flag out to go on here."
        )
    if not folder.is_dir():
        raise UserError(
            f"--fork-from {asked}: no such folder. Name a checkpoint of another run, such as "
            "runs/old/checkpoints/step_000600."
        )
    try:
        verify_checkpoint(folder)
    except ShardDamaged as error:
        raise ShardDamaged(f"--fork-from {asked}: {error} Name another.") from error
    return folder


def open_fork(root: Path, asked: str, fields: Fields) -> Fork | None:
    """As `find_fork`, which raises, with the training that wrote it.

    `fields` are those of the new training. Raises RecipeChanged where the other one differs in
    what cannot change in the middle of a training, UserError where its record is not there.
    """
    folder = find_fork(root, asked)
    if folder is None:
        return None
    state = read_state(folder)
    made = training_of(folder)
    if made is None:
        raise UserError(
            f"--fork-from {asked}: {folder.parent} has no record of the training that wrote it. "
            "Name a checkpoint in the `checkpoints` folder of its own run."
        )
    _refuse_other_training(asked, made.fields, fields)
    run = str(folder.parent.parent)
    parent = Parent(run=run, name=folder.name, step=state.step, fingerprint=state.fingerprint)
    return Fork(folder=folder, parent=parent, made=made)


def _refuse_other_training(asked: str, made: Fields, fields: Fields) -> None:
    changed = changed_fields(made, fields)
    refused = [key for key in changed if not keys_of([key], CHANGEABLE)]
    if refused:
        rows = "\n  ".join(
            difference(
                {k: v for k, v in made.items() if k in refused},
                {k: v for k, v in fields.items() if k in refused},
            )
        )
        raise RecipeChanged(
            f"--fork-from {asked}: of a training that differs in what no training can change on "
            f"the way (made -> asked):\n  {rows}\nPut those values back, or leave the flag out to "
            "train from the beginning. (drafter.warm_start takes the weights alone.)"
        )
