"""`paceline init`."""

import os
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli.settings import Setting, settings_named
from paceline.cli.terminal import say
from paceline.durable.errors import DataError, RecipeError, UserError
from paceline.durable.fs import write_atomic
from paceline.recipe.check import check_paths, check_recipe, notes
from paceline.recipe.data_files import data_name
from paceline.recipe.load import resolve_paths
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    ScoreRecipe,
    SourceRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.recipe.write import template
from paceline.rows.conversation import conversation_of
from paceline.rows.formats import read_rows
from paceline.rows.rejection import RowRejected
from paceline.target.folder import ModelFolder
from paceline.target.taps import default_taps
from paceline.watch.words import command_line, counted

_LOOKED_AT = 20
"""Rows of each file that are read to see whether its form is known."""

_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}
"""Slot weight decay by block size, as in the DFlash paper (docs/algorithms.md, "Training step")."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Writes a recipe in which every key is explained, with values that suit the target model and
    this machine. Edit it, or run it as it is.

    Reads: the model's config.json, and the first rows of each data file to see that they are
    conversations.

    Writes: the recipe; nothing else.

    Example: paceline init --target models/smollm2 --data chats.jsonl --heldout questions.jsonl
    """  # noqa: D205

    target: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The model to make faster: a Transformers folder (config.json, safetensors, tokenizer)."""
    data: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="DATA [DATA ...]", help_behavior_hint="(required)"),
    ] = ()
    """Conversations or prompts to train on, ShareGPT or OpenAI rows: files (.jsonl, .json,
    .parquet, .arrow, .txt), folders of them, or hf:OWNER/NAME."""
    heldout: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="DATA [DATA ...]", help_behavior_hint="(default: none)"),
    ] = ()
    """Prompts that are only scored on, never trained on."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("recipe.yaml")
    """Where to write the recipe."""
    force: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: refuse)")
    ] = False
    """Replace a file that is there already."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    # Appended, not replaced, where a flag is given twice: no file is dropped in silence.
    data, heldout = tuple(chain(*args.data)), tuple(chain(*args.heldout))
    if not data:
        raise UserError("--data: no file given. Name at least one file of conversations.")
    if args.out.exists() and not args.force:
        raise UserError(f"{args.out} exists. Choose another name with --out, or give --force.")
    # Paths first: what follows opens them.
    sources = sources_of(tuple(map(str, data)), tuple(map(str, heldout)))
    bare = Recipe(target=TargetRecipe(path=str(args.target)), corpus=CorpusRecipe(sources=sources))
    check_paths(resolve_paths(bare))
    for source in sources:
        _check_form(source.path)
    recipe = suggest(ModelFolder(args.target), sources, has_cuda=Path("/dev/nvidia0").exists())
    check_recipe(recipe)
    command = command_line("paceline", "run", args.out)
    text = (
        f"# A recipe for Paceline. To run it: {command}\n"
        "# Relative paths are relative to the folder that the command runs in.\n\n"
    )
    with settings_named([Setting("--out FILE", args.out)]):
        write_atomic(args.out, (text + template(recipe)).encode())
    layers = counted(recipe.drafter.layers, "layer")
    say(f"wrote {args.out}: blocks of {recipe.drafter.block_size}, {layers}")
    for note in notes(recipe):
        say(f"note: {note}")
    say(f"the run will lie in runs/{recipe.name}, after `name` in the recipe")
    say(f"next: {command}")
    return 0


def suggest(folder: ModelFolder, sources: tuple[SourceRecipe, ...], *, has_cuda: bool) -> Recipe:
    """A recipe with values that suit a target's sizes.

    Looks at the folder's JSON files alone, because a target's identity (`read_spec`) takes
    reading all its weights. Raises TargetError where the folder is incomplete or unsupported.
    """
    folder.weights()
    layers = folder.get("num_hidden_layers")
    hidden = folder.get("hidden_size")
    max_length = _longest_sample(folder)
    block = min(8 if hidden < 1024 else 10 if hidden < 2048 else 16, max_length)
    device = "cuda:0" if has_cuda else "cpu"
    cores = len(os.sched_getaffinity(0))
    train = TrainRecipe(device=device, threads=cores, gamma=_GAMMAS.get(block, 4.0))
    extract = ExtractRecipe(num_taps=_num_taps(layers))
    return Recipe(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", folder.path.resolve().name).lstrip(".-") or "run",
        target=TargetRecipe(
            path=str(folder.path),
            dtype="bfloat16" if has_cuda else "float32",
            device=device,
            threads=cores,
        ),
        corpus=CorpusRecipe(sources=sources, max_length=max_length),
        regenerate=RegenerateRecipe(max_new_tokens=min(512, max_length // 2)),
        extract=extract,
        drafter=DrafterRecipe(layers=min(5, max(1, layers // 4)), block_size=block),
        train=train,
        score=ScoreRecipe(max_new_tokens=min(256, max_length // 2)),
    )


def _num_taps(layers: int) -> int:
    """As many as usual, fewer where the target is too shallow for them."""
    for count in range(ExtractRecipe().num_taps, 1, -1):
        try:
            default_taps(layers, count)
        except RecipeError:
            continue
        return count
    return 1


def longest_sample(target: Path) -> int:
    """A `corpus.max_length` that suits a target; the built-in one for a tokenizer alone."""
    if not (target / "config.json").is_file():
        return CorpusRecipe().max_length
    return _longest_sample(ModelFolder(target))


def _longest_sample(folder: ModelFolder) -> int:
    return min(folder.get("max_position_embeddings"), 4096)


def sources_of(data: tuple[str, ...], heldout: tuple[str, ...]) -> tuple[SourceRecipe, ...]:
    """One source per file; files that share a stem are told apart by their folder and number."""
    sources: list[SourceRecipe] = []
    taken: set[str] = set()
    for path in (*data, *heldout):
        stem = data_name(path)
        choices = [stem, f"{Path(path).absolute().parent.name}-{stem}"]
        choices += [f"{stem}-{n}" for n in range(2, len(data) + len(heldout) + 1)]
        name = next(choice for choice in choices if choice not in taken)
        taken.add(name)
        split = "train" if len(sources) < len(data) else "heldout"
        sources.append(SourceRecipe(path=path, name=name, split=split))
    return tuple(sources)


def _check_form(path: str) -> None:
    """Refuse a file of whose first rows none is a conversation. Raises DataError."""
    first: str | None = None
    for row in read_rows(path, _LOOKED_AT):
        if row.is_blank:
            continue
        try:
            if row.value is not None:
                if "input_ids" not in row.value and not isinstance(row.value.get("text"), str):
                    conversation_of(row.value)
                return
            fault = row.fault
        except RowRejected as rejected:
            fault = rejected
        first = first or f"row {row.line}: {fault}"
    raise DataError(
        f"{path}: {first or 'no rows'}. Rows have to be JSON objects with `messages`, "
        "`conversations` (ShareGPT), `prompt`, `text`, or `input_ids` with `loss_mask`."
    )
