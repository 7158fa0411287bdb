"""`paceline run`."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from paceline.cli.report import add_report
from paceline.cli.stages import TrainArgs, open_run, run_stages, train_options
from paceline.cli.terminal import header, say
from paceline.pipeline import STAGES
from paceline.recipe.check import notes
from paceline.recipe.extract_inputs import is_object_store
from paceline.recipe.run_dir import RunDir
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


def _refuse_early(recipe: Recipe, run_dir: RunDir, args: Args) -> None:
    """What a later stage would refuse is refused before the hours that lead there."""
    if is_object_store(recipe.extract.store):
        from paceline.durable.open_store import open_store

        open_store(recipe.extract.store, recipe.extract.store_options)
    if recipe.drafter.vocab_text:
        from paceline.train.vocab_text import read_texts

        for path in recipe.drafter.vocab_text:
            # All of it is read when it is counted; a file of another form shows at once.
            next(read_texts(Path(path)), None)
    if args.resume_from:
        from paceline.train.resume import find_checkpoint  # imports torch

        find_checkpoint(run_dir.checkpoints, args.resume_from)
    if args.fork_from:
        from paceline.train.fork import find_fork  # imports torch

        find_fork(run_dir.checkpoints, args.fork_from)


def _target_notes(recipe: Recipe) -> tuple[str, ...]:
    from paceline.target.fit import fit_notes
    from paceline.target.spec import read_spec

    return tuple(fit_notes(recipe, read_spec(Path(recipe.target.path), identify=False)))


def _warm_start_notes(recipe: Recipe) -> tuple[str, ...]:
    """As early: what the training could not start from is refused at once."""
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
    _refuse_early(recipe, run_dir, args)
    for note in (*notes(recipe), *_target_notes(recipe), *_warm_start_notes(recipe)):
        say(f"note: {note}")
    code = run_stages([name for name, _ in STAGES], recipe, run_dir, options)
    code = max(code, add_report(run_dir))
    header("finished" if code == 0 else "finished, with parts not done")
    results = f"Results: {run_dir.score}, on one page: {run_dir.report}"
    say(f"{duration(monotonic() - started)} in all. {results}")
    return code
