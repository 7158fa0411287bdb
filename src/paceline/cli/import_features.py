"""`paceline import`: takes over hidden states that other tools computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from paceline.cli.terminal import say
from paceline.durable.errors import UserError
from paceline.durable.owner import owned
from paceline.recipe.check import check_recipe
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.write import check_run_recipe, is_run
from paceline.upstream import require_inputs


@dataclass(frozen=True, kw_only=True)
class Args:
    """Takes over hidden states that SpecForge or speculators computed of the very samples of this
    run, so that they need not be computed again. Samples are matched by their token ids alone, and
    loss masks are the run's own. A shard is imported where the cache has all of its samples;
    `paceline extract` makes the others and publishes all. Before anything is kept, samples are
    captured with the target and compared: where the cache counts layers otherwise, or its last
    state is not normed, the flags that are right are named.

    Reads: SOURCE, which is left as it is; the corpus and recipe of the run, and the target. Of a
    pickle only plain tensors are ever loaded.

    Writes: shards and journal in `features/`, or in the store of the recipe.

    Exit code: 0 where every file could be read; 1 where some could not, or nothing was imported;
    2 where it is refused.

    Example: paceline import runs/demo caches/hidden_states --from specforge
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory, with its corpus."""
    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """The folder that the tool wrote: `data_*.ckpt[.gz]` of SpecForge, `hs_*.safetensors` or
    `data_*.pt` of speculators, in folders of any depth."""
    tool: Annotated[Literal["specforge", "speculators"], tyro.conf.arg(name="from")]
    """Which tool wrote it."""
    layers: Annotated[
        str | None, tyro.conf.arg(metavar="I,J,K", help_behavior_hint="(default: the tool's own)")
    ] = None
    """The layers that it was made with, as the tool counts them."""
    convention: Annotated[
        Literal["output-after", "input-of"] | None,
        tyro.conf.arg(metavar="MEANING", help_behavior_hint="(default: the tool's own)"),
    ] = None
    """What layer i, counted from 0, means: `output-after` it or `input-of` it."""
    last: Annotated[
        Literal["normed", "un-normed", "absent"] | None,
        tyro.conf.arg(metavar="STATE", help_behavior_hint="(default: the tool's own)"),
    ] = None
    """What the last hidden state is: `normed`, `un-normed` (before the final norm), `absent`."""
    check: Annotated[
        int, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 2; 0: none)")
    ] = 2
    """Samples captured with the target and compared before anything is kept."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    layers = _layers(args.layers)
    if args.check < 0:
        raise UserError(f"--check {args.check}: give 0 or more.")
    if not is_run(args.run):
        raise UserError(f"{args.run}: not a run directory. Give one, such as runs/demo.")
    run_dir = RunDir(args.run)
    check_run_recipe(run_dir.recipe)
    recipe = load_recipe(run_dir.recipe)
    check_recipe(recipe)
    with owned(args.run, "paceline import"):
        require_inputs("extract", recipe, run_dir)

        from paceline.extract.foreign import ImportRequest, import_features
        from paceline.extract.foreign_layers import Stated

        request = ImportRequest(
            source=args.source,
            tool=args.tool,
            stated=Stated(layers, args.convention, args.last),
            check=args.check,
        )
        report = import_features(recipe, run_dir, request)
    for line in report.lines:
        say(line)
    for sentence in report.undone:
        say(f"not done: {sentence}")
    return 1 if report.undone else 0


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--layers {text}: give ids with commas, such as 2,14,25.") from error
