"""`paceline regenerate`."""

from dataclasses import dataclass

from paceline.cli.stages import StageArgs, open_run, run_stages


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Has the target answer every prompt itself, because a drafter learns from the target's own
    words. Answers are committed in groups, or by single ones of `regenerate.servers`, and a run
    that was stopped goes on with what is missing.

    Reads: `corpus/prepared.jsonl` of the run (from `paceline prepare`) and the target model.

    Writes: `corpus/regenerated.jsonl`. With `regenerate.enabled: false` it does nothing.

    Example: paceline regenerate recipe.yaml --run runs/demo
    """  # noqa: D205


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe, run_dir = open_run(args, "regenerate")
    return run_stages(["regenerate"], recipe, run_dir)
