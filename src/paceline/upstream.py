"""What a stage builds on: that of the stages before it, made by this recipe and whole.

A stage judges its own artefacts by their fingerprint, which covers its inputs as they are. That
they are what the recipe asks for, only this look at the records of the earlier stages can tell.
"""

from collections.abc import Iterator
from pathlib import Path

from paceline.durable.errors import DataError, IntegrityError, RecipeChanged, UserError
from paceline.recipe.drafter_inputs import drafter_input_fields
from paceline.recipe.fingerprint import Fields, changed_fields, difference, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import source_fields
from paceline.recipe.stage import Record, changed_outputs, permission, read_record
from paceline.recipe.training import CHANGEABLE, training_fields
from paceline.target.folder import ModelFolder
from paceline.target.taps import default_taps

_OPEN = {
    "prepare": ("sources.", "corpus.template_args."),
    "regenerate": ("corpus.template_args.",),
    "extract": ("extract.layer_ids.",),
    "train": ("template_args.", "vocab_text.", "warm_start."),
}
"""Mappings and lists by stage: an entry that stands on one side alone is a difference too."""


def require_inputs(name: str, recipe: Recipe, run_dir: RunDir) -> None:
    """Check every stage before `name`; reads their records and the outputs listed there.

    Raises UserError where one has not come to its end, RecipeChanged where one was made by
    another recipe, IntegrityError where an output is not as it was written.
    """
    for stage, folder in _before(name, recipe, run_dir):
        record = read_record(folder, stage)
        if record is None or record.outputs is None:
            raise UserError(
                f"{folder}: `paceline {stage}` has not come to its end here, and {name} builds on "
                f"it. Run it first (`paceline run` does all stages in order)."
            )
        _refuse_change(name, folder, record, _asked(recipe, record))
        changed = changed_outputs(folder, record)
        if changed:
            raise IntegrityError(
                f"{changed[0]}: missing, or not as `paceline {stage}` wrote it. Run "
                f"`paceline {stage}` again: it keeps what is whole and makes the rest anew."
            )


def _before(name: str, recipe: Recipe, run_dir: RunDir) -> Iterator[tuple[str, Path]]:
    for stage, folder in (
        ("prepare", run_dir.corpus),
        ("regenerate", run_dir.corpus),
        ("extract", run_dir.features),
        ("train", run_dir.checkpoints),
    ):
        if stage == name:
            return
        if stage != "regenerate" or recipe.regenerate.enabled:
            yield stage, folder


def _asked(recipe: Recipe, record: Record) -> Fields:
    """The recipe in the words of a stage's record."""
    asked = flatten(recipe)
    match record.stage:
        case "prepare":
            try:
                return asked | source_fields(recipe)
            except DataError:
                # Data that has gone since cannot be compared, and nothing from here on reads it.
                return asked | {k: v for k, v in record.fields.items() if k.startswith("sources.")}
        case "extract":
            layers = ModelFolder(Path(recipe.target.path)).get("num_hidden_layers")
            taps = recipe.extract.taps or default_taps(layers, recipe.extract.num_taps)
            return asked | flatten({"extract": {"layer_ids": taps}})
        case "train":
            own = {
                "template_args": recipe.corpus.template_args,
                "train": training_fields(recipe.train),
            }
            try:
                inputs = drafter_input_fields(recipe.drafter)
            except DataError:
                kept = ("vocab_text.", "warm_start.")
                inputs = {k: v for k, v in record.fields.items() if k.startswith(kept)}
            return asked | flatten(own) | inputs
        case _:
            return asked


def _refuse_change(name: str, folder: Path, record: Record, asked: Fields) -> None:
    open_ended = _OPEN[record.stage]
    made = {k: v for k, v in record.fields.items() if k in asked or k.startswith(open_ended)}
    wanted = {k: v for k, v in asked.items() if k in made or k.startswith(open_ended)}
    changed = changed_fields(made, wanted)
    if changed:
        rows = "\n  ".join(difference(made, wanted))
        way = permission(changed, CHANGEABLE) if record.stage == "train" else ""
        raise RecipeChanged(
            f"{folder}: the {record.stage} artefacts, which {name} builds on, were made by another "
            f"recipe (made -> asked):\n  {rows}\n"
            "Two ways out: use a new run directory (`--run DIR`), or put the old values back."
            f"{way}"
        )
