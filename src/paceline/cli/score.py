"""`paceline score`."""

from dataclasses import dataclass

from paceline.cli.report import add_report
from paceline.cli.stages import StageArgs, open_run, run_stages


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Decodes held-out prompts with the drafter and measures how many tokens each step of the
    target yields (acceptance), and how much faster that is. Without held-out data it uses the
    validation prompts.

    Reads: the best checkpoint of the run, the target model, and the held-out prompts.

    Writes: `score/result.json`: the numbers, with the raw rounds of every prompt; and
    `report.html`, the run on one page.

    Example: paceline score --run runs/demo
    """  # noqa: D205


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe, run_dir = open_run(args, "score")
    code = run_stages(["score"], recipe, run_dir)
    return max(code, add_report(run_dir))
