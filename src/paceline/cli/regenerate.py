"""`paceline regenerate`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline.cli.stages import StageArgs, open_run, run_stages
from paceline.durable.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Has the target answer every prompt itself, because a drafter learns from the target's own
    words. Answers are committed in groups, or by single ones of `regenerate.servers`, and a run
    that was stopped goes on with what is missing.

    Reads: `corpus/prepared.jsonl` of the run (from `paceline prepare`) and the target model.

    Writes: `corpus/regenerated.jsonl`. With `regenerate.enabled: false` it does nothing.

    Example: paceline regenerate recipe.yaml --run runs/demo
    """  # noqa: D205

    ask_again: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="REASON[,REASON]", help_behavior_hint="(repeatable)"),
    ] = ()
    """Have prompts asked again whose answers by servers were left out for this reason of
    `corpus/regenerate-quarantine.jsonl`, such as `server_rejected`; all else is kept."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe, run_dir = open_run(args, "regenerate")
    reasons = [reason.strip() for some in args.ask_again for reason in some.split(",")]
    if not all(reasons):
        raise UserError("--ask-again: empty. Name a reason, such as server_rejected.")
    options = {"regenerate": {"ask_again": reasons}} if reasons else {}
    return run_stages(["regenerate"], recipe, run_dir, options)
