"""`paceline extract`."""

from dataclasses import dataclass

from paceline.cli.stages import StageArgs, open_run, run_stages


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Runs the target over the samples and keeps the hidden states that the drafter learns from.
    Each file is verified before it counts, and a run that was stopped redoes only what is missing.

    Reads: the samples in `corpus/` of the run and the target model.

    Writes: `features/`, some kilobytes for each token.

    Example: paceline extract recipe.yaml --run runs/demo
    """  # noqa: D205


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe, run_dir = open_run(args, "extract")
    return run_stages(["extract"], recipe, run_dir)
