"""`paceline lint`."""

import dataclasses
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli.init import longest_sample, sources_of
from paceline.cli.settings import Setting, settings_named
from paceline.cli.terminal import header, say
from paceline.durable.errors import UserError
from paceline.recipe.check import check_recipe
from paceline.recipe.load import load_recipe, resolve_paths, with_overrides
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Shows what `prepare` would make of data before anything is run: which tokens are trained on,
    what is left out and why, lengths, languages, duplicates, overlap with evaluation prompts, and
    samples in colour. Findings come first, each with what to do.

    Rows with answers are judged by their answers. Where no row has one, or with --prompts, by
    their prompts alone, as the target will answer them.

    Reads: all rows of the data, and the target's tokenizer; no weights.

    Writes: the page, which needs no network; while it works, a corpus in the folder for temporary
    files (TMPDIR), which is removed.

    Exit code: 0 where the data are usable; 1 where a finding is serious: nothing can be trained
    on, a source gives nothing or loses a third of its rows to faults, a mask is all ones, no
    answer ends with an end token; 2 where the data or the target cannot be read.

    Example: paceline lint chats.jsonl --target models/smollm2 --heldout questions.jsonl
    """  # noqa: D205

    data: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[DATA ...]", help_behavior_hint="(default: that of --recipe)"),
    ] = ()
    """Conversations or prompts, as the recipe's `corpus.sources` take them."""
    target: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: that of --recipe)"),
    ] = None
    """The model's folder; its tokenizer and chat template are enough."""
    recipe: Annotated[
        Path | None, tyro.conf.arg(metavar="RECIPE.yaml", help_behavior_hint="(default: none)")
    ] = None
    """Take data, target and all settings of the corpus from this recipe; DATA, --heldout and
    --target go before what it says."""
    heldout: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(metavar="DATA [DATA ...]", help_behavior_hint="(default: none)"),
    ] = ()
    """Evaluation prompts: how much of them stands in the data."""
    prompts: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: answers)")
    ] = False
    """Look at prompts alone, because the target will answer them (regenerate.enabled)."""
    overrides: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="set", metavar="KEY=VALUE", help_behavior_hint="(repeatable)"),
    ] = ()
    """Change one key of the recipe, such as `corpus.template_args.enable_thinking=false`."""
    limit: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all)")
    ] = None
    """Read this many rows of each source at most."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("lint.html")
    """Where to write the page."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe = _recipe(args)
    from paceline.corpus.lint.findings import findings, is_usable
    from paceline.corpus.lint.lint import lint
    from paceline.corpus.lint.page import render
    from paceline.corpus.lint.text import sections
    from paceline.corpus.lint.write import require_place, write_page

    places = [Setting("--out FILE", args.out)]
    places += [Setting("DATA", Path(s.path), is_written=False) for s in recipe.corpus.sources]
    with settings_named(places):
        require_place(args.out)
        result = lint(recipe, may_be_prompts=_may_be_prompts(args))
        found = findings(result)
        # First, so that a reader of the lines who goes away early (`| head`) has it all the same.
        write_page(args.out, render(result, found))
    for title, lines in sections(result, found):
        header(title)
        for line in lines:
            say(line)
    say(f"wrote {args.out}")
    return 0 if is_usable(found) else 1


def _may_be_prompts(args: Args) -> bool:
    """Whether nobody has said if the target will answer."""
    said = any(o.partition("=")[0].strip() == "regenerate.enabled" for o in args.overrides)
    return args.recipe is None and not said


def _recipe(args: Args) -> Recipe:
    """What is asked for, checked as far as it concerns the corpus.

    Raises UserError where data or target are not told, RecipeError as `load_recipe` and
    `check_recipe`.
    """
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit: {args.limit} is impossible. Give a number above 0.")
    recipe = _from_flags(args) if args.recipe is None else _from_recipe(args, args.recipe)
    if args.prompts:
        asked = dataclasses.replace(recipe.regenerate, enabled=True)
        recipe = dataclasses.replace(recipe, regenerate=asked)
    recipe = _corpus_alone(recipe)
    check_recipe(recipe)
    return recipe


def _from_flags(args: Args) -> Recipe:
    if not args.data:
        raise UserError("no data. Name at least one file (`paceline lint chats.jsonl ...`).")
    if args.target is None:
        raise UserError(
            "no target. Give the model's folder (`--target DIR`): its chat template and tokenizer "
            "say what is trained on."
        )
    sources = sources_of(args.data, tuple(chain(*args.heldout)))
    longest = longest_sample(args.target)
    recipe = Recipe(
        target=TargetRecipe(path=str(args.target)),
        corpus=CorpusRecipe(sources=_limited(sources, args.limit), max_length=longest),
        regenerate=RegenerateRecipe(enabled=False),
    )
    return resolve_paths(with_overrides(recipe, args.overrides))


def _from_recipe(args: Args, path: Path) -> Recipe:
    recipe = load_recipe(path, args.overrides)
    sources = recipe.corpus.sources
    given = sources_of(args.data, tuple(chain(*args.heldout)))
    for split in {source.split for source in given}:
        sources = tuple(source for source in sources if source.split != split)
    sources += given
    recipe = dataclasses.replace(
        recipe,
        corpus=dataclasses.replace(recipe.corpus, sources=_limited(sources, args.limit)),
    )
    if args.target is not None:
        target = dataclasses.replace(recipe.target, path=str(args.target))
        recipe = dataclasses.replace(recipe, target=target)
    return resolve_paths(recipe)


def _limited(sources: tuple[SourceRecipe, ...], limit: int | None) -> tuple[SourceRecipe, ...]:
    if limit is None:
        return sources
    return tuple(dataclasses.replace(source, limit=limit) for source in sources)


def _corpus_alone(recipe: Recipe) -> Recipe:
    """Without what only later stages ask for, so that nothing of it is judged."""
    longest = recipe.corpus.max_length
    return Recipe(
        target=recipe.target,
        corpus=recipe.corpus,
        regenerate=RegenerateRecipe(enabled=recipe.regenerate.enabled, max_new_tokens=1),
        extract=ExtractRecipe(batch_tokens=longest),
        drafter=DrafterRecipe(block_size=min(DrafterRecipe().block_size, longest)),
    )
