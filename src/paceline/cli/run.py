"""`paceline run`."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from paceline.cli.report import add_report
from paceline.cli.stages import TrainArgs, open_run, run_stages, train_options
from paceline.cli.terminal import header, say
from paceline.durable.errors import TargetError
from paceline.pipeline import STAGES
from paceline.recipe.check import notes
from paceline.recipe.schema import Recipe
from paceline.watch.words import duration


@dataclass(frozen=True, kw_only=True)
class Args(TrainArgs):
    """Runs all stages in order: prepare, regenerate, extract, train, score. What is complete is
    left alone, so after a stop the same command goes on where it was.

    Reads: the recipe; the target model and the data that it names.

    Writes: the run directory. `report.html` shows it on one page, `score/` has the measurement,
    `checkpoints/` the drafters.

    Example: paceline run recipe.yaml --run runs/demo
    """  # noqa: D205


def _target_notes(path: Path) -> list[str]:
    """What a stage at the end would refuse is said before the hours that lead there."""
    from paceline.target.families import LayerKind
    from paceline.target.folder import ModelFolder

    try:
        folder = ModelFolder(path)
        kinds = {*folder.family.layer_kinds(folder.config)} - {LayerKind.FULL}
    except (TargetError, LookupError, ValueError):
        return []  # The first stage that reads the target says what is wrong with it.
    if not kinds:
        return []
    names = ", ".join(sorted(kind.value for kind in kinds))
    return [
        f"this target has {names} layers: everything but `score` works with it, which will refuse."
    ]


def _warm_start_notes(recipe: Recipe) -> tuple[str, ...]:
    """As with the target: what the training could not start from is refused at once."""
    if recipe.drafter.warm_start is None:
        return ()
    from paceline.train.start import check_warm_start  # imports torch

    return check_warm_start(recipe)


def run(args: Args) -> int:
    """Run the command; the exit code."""
    started = monotonic()
    options = train_options(args)
    recipe, run_dir = open_run(args, "run")
    say(f"run {recipe.name} in {run_dir.root}")
    target = Path(recipe.target.path)
    for note in (*notes(recipe), *_target_notes(target), *_warm_start_notes(recipe)):
        say(f"note: {note}")
    code = run_stages([name for name, _ in STAGES], recipe, run_dir, options)
    code = max(code, add_report(run_dir))
    header("finished" if code == 0 else "finished, with parts not done")
    results = f"Results: {run_dir.score}, on one page: {run_dir.report}"
    say(f"{duration(monotonic() - started)} in all. {results}")
    return code
