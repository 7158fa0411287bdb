"""`paceline extract`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline.cli.stages import StageArgs, open_run, run_stages
from paceline.extract.slices import parse_slice


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Runs the target over the samples and keeps the hidden states that the drafter learns from.
    Each file is verified before it counts, and a run that was stopped redoes only what is missing.

    Reads: the samples in `corpus/` of the run and the target model.

    Writes: `features/`, or the store of the recipe: some kilobytes for each token.

    Example: paceline extract recipe.yaml --run runs/demo
    """  # noqa: D205

    shard: Annotated[
        str | None,
        tyro.conf.arg(metavar="I/N", help_behavior_hint="(default: all of it)"),
    ] = None
    """Do the I-th of N parts alone: for N machines that share an object store and no disk. Each
    has its own run directory with the same corpus; whichever completes the last part publishes."""
    accept_code: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: refuse)")
    ] = False
    """Go on in a shared store whose first shards were made by another version of Paceline."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    if args.shard is not None:
        parse_slice(args.shard)
    recipe, run_dir = open_run(args, "extract")
    options = {"shard": args.shard, "accept_code": args.accept_code}
    asked = {name: value for name, value in options.items() if value}
    return run_stages(["extract"], recipe, run_dir, {"extract": asked})
