"""What a stage builds on: that of the stages before it, made by this recipe and whole.

A stage judges its own artefacts by their fingerprint, which covers its inputs as they are. That
they are what the recipe asks for, only this look at the records of the earlier stages can tell.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.durable.errors import DataError, IntegrityError, RecipeChanged, UserError
from paceline.recipe import corpus_inputs
from paceline.recipe.drafter_inputs import drafter_input_fields
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.fingerprint import Fields, changed_fields, difference, flatten, keys_of
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import score_fields
from paceline.recipe.served_inputs import IN_PROCESS
from paceline.recipe.sources import source_fields
from paceline.recipe.stage import Record, changed_outputs, permission, read_record
from paceline.recipe.training import CHANGEABLE, LATER_KEYS, training_fields
from paceline.target.folder import ModelFolder
from paceline.target.taps import taps_of
from paceline.target.template import RENDERED_BY, rendering_files

_OPEN = {
    "prepare": ("sources.", "corpus.roles.", "corpus.template_args.", "end_tokens."),
    "regenerate": ("corpus.template_args.", "regenerate.server_options."),
    "extract": ("extract.layer_ids.",),
    "train": ("template_args.", "vocab_text.", "warm_start.", "train.objective."),
    "score": ("score.datasets.", "score.convention", "score.warmup"),
}
"""Mappings and lists by stage: an entry that stands on one side alone is a difference too."""

_UNSAID: Mapping[str, Fields] = {
    "prepare": corpus_inputs.UNSAID,
    "regenerate": {"regenerate.api": IN_PROCESS},
    "extract": {"extract.codec": "none", "extract.samples": "all"},
    "train": LATER_KEYS,
}
"""What a record that does not say so means, by stage."""


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
        keys, rows = _changed(record, _asked(recipe, record))
        if keys:
            raise RecipeChanged(
                f"{folder}: the {stage} artefacts, which {name} builds on, were made by another "
                f"recipe (made -> asked):\n  {rows}\n{_ways_out(record, keys)}"
            )
        changed = changed_outputs(folder, record)
        if changed:
            raise IntegrityError(
                f"{changed[0]}: missing, or not as `paceline {stage}` wrote it. Run "
                f"`paceline {stage}` again: it keeps what is whole and makes the rest anew."
            )


def require_agreement(recipe: Recipe, run_dir: RunDir, *, allowed: Sequence[str] = ()) -> None:
    """Check, before any stage begins, that each finished one was made by this recipe.

    What the last stage would refuse after the hours of the others is refused at once, and none of
    them begins by a recipe that it would refuse. `allowed` keys of the training may differ. Raises
    RecipeChanged.
    """
    for stage, folder in (*_before("", recipe, run_dir), ("score", run_dir.score)):
        try:
            record = read_record(folder, stage)
        except IntegrityError:
            continue  # The stage itself says what to do.
        if record is None or record.outputs is None:
            continue
        keys, rows = _changed(record, _asked(recipe, record))
        if any(not keys_of([key], allowed) for key in keys):
            raise RecipeChanged(
                f"{folder}: the {stage} artefacts were made by another recipe (made -> asked):\n"
                f"  {rows}\n{_ways_out(record, keys)} (To have {stage} done anew here, remove "
                f"{folder} yourself.)"
            )


def is_begun(name: str, run_dir: RunDir) -> bool:
    """Whether a stage has begun here and has not come to its end: nothing can build on it."""
    folders = {
        "prepare": run_dir.corpus,
        "regenerate": run_dir.corpus,
        "extract": run_dir.features,
        "train": run_dir.checkpoints,
        "score": run_dir.score,
    }
    record = read_record(folders[name], name)
    return record is not None and record.outputs is None


def is_cleaned(run_dir: RunDir) -> bool:
    """Whether the features were cleaned away after the training, which stands as it was written.

    Then nothing is left for either stage to do: to make the features again would be for nobody.
    """
    extract = read_record(run_dir.features, "extract")
    train = read_record(run_dir.checkpoints, "train")
    if extract is None or train is None or not train.outputs:
        return False
    is_away = extract.outputs == {} and "cleaned" in extract.report
    return is_away and not changed_outputs(run_dir.checkpoints, train)


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
            asked |= _rendering(recipe, record)
            try:
                return asked | source_fields(recipe)
            except DataError:
                # Data that has gone since cannot be compared, and nothing from here on reads it.
                return asked | {k: v for k, v in record.fields.items() if k.startswith("sources.")}
        case "regenerate" if not recipe.regenerate.servers:
            return asked | {"regenerate.api": IN_PROCESS}
        case "extract":
            layers = ModelFolder(Path(recipe.target.path)).get("num_hidden_layers")
            taps = taps_of(recipe.extract, layers)
            codec = resolved_codec(recipe.extract)
            samples = "validation" if recipe.train.online else "all"
            kept = {"layer_ids": taps, "codec": codec, "samples": samples}
            return asked | flatten({"extract": kept})
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
        case "score":
            try:
                own = flatten({"score": score_fields(recipe.score)})
            except DataError:
                # Prompts that have gone since: what was measured on them stands.
                own = {k: v for k, v in record.fields.items() if k.startswith("score.")}
            return own
        case _:
            return asked


def _rendering(recipe: Recipe, record: Record) -> Fields:
    """What the target's folder says of template, tokenizer and end tokens.

    Where its files are those that `prepare` read, so is what follows from them: nothing heavy is
    loaded then, which a process that only supervises others would keep.
    """
    files = rendering_files(Path(recipe.target.path), recipe.corpus.template_file)
    if record.report.get(RENDERED_BY) == files:
        kept = ("template", "tokenizer", "end_tokens.")
        return {key: value for key, value in record.fields.items() if key.startswith(kept)}
    # By name, as the pipeline does: whoever looks at records need not load a stage.
    prepare = importlib.import_module("paceline.corpus.stage")
    return prepare.rendering_fields(recipe)


def _changed(record: Record, asked: Fields) -> tuple[list[str], str]:
    """Keys of the recipe that differ from the record's, and the rows that say so."""
    open_ended = _OPEN.get(record.stage, ())
    fields = {**_UNSAID.get(record.stage, {}), **record.fields}
    made = {k: v for k, v in fields.items() if k in asked or k.startswith(open_ended)}
    wanted = {k: v for k, v in asked.items() if k in made or k.startswith(open_ended)}
    return changed_fields(made, wanted), "\n  ".join(difference(made, wanted))


def _ways_out(record: Record, changed: list[str]) -> str:
    way = permission(changed, CHANGEABLE) if record.stage == "train" else ""
    return f"Two ways out: use a new run directory (`--run DIR`), or put the old values back.{way}"
