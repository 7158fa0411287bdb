"""`paceline train`."""

from dataclasses import dataclass

from paceline.cli.stages import TrainArgs, open_run, run_stages, train_options


@dataclass(frozen=True, kw_only=True)
class Args(TrainArgs):
    """Trains the drafter on the kept hidden states; the target itself is not run. It is measured on
    validation samples along the way, and a run that was stopped goes on from its last checkpoint.

    Reads: `features/` of the run, and the target's embedding and head.

    Writes: `checkpoints/`, a folder for each evaluation; the best one is kept.

    Example: paceline train recipe.yaml --run runs/demo
    """  # noqa: D205


def run(args: Args) -> int:
    """Run the command; the exit code."""
    options = train_options(args)
    recipe, run_dir = open_run(args, "train")
    return run_stages(["train"], recipe, run_dir, options)
