"""`paceline run`."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from paceline.cli.stages import StageArgs, open_run, run_stages
from paceline.cli.terminal import duration, header, say
from paceline.durable.errors import TargetError
from paceline.pipeline import STAGES
from paceline.recipe.check import notes


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Runs all stages in order: prepare, regenerate, extract, train, score. What is complete is
    left alone, so after a stop the same command goes on where it was.

    Reads: the recipe; the target model and the data that it names.

    Writes: the run directory. `score/` has the measurement, `checkpoints/` the drafters.

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


def run(args: Args) -> int:
    """Run the command; the exit code."""
    started = monotonic()
    recipe, run_dir = open_run(args, "run")
    say(f"run {recipe.name} in {run_dir.root}")
    for note in (*notes(recipe), *_target_notes(Path(recipe.target.path))):
        say(f"note: {note}")
    code = run_stages([name for name, _ in STAGES], recipe, run_dir)
    header("finished" if code == 0 else "finished, with parts not done")
    say(f"{duration(monotonic() - started)} in all. Results: {run_dir.score}")
    return code
