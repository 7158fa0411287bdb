"""What the commands that run stages have in common: arguments, the recipe, the run directory."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.cli.settings import settings_named, settings_of
from paceline.cli.terminal import header, say
from paceline.durable.errors import (
    DataError,
    IntegrityError,
    RecipeError,
    TargetError,
    UserError,
)
from paceline.durable.owner import Owner, owned
from paceline.pipeline import STAGES, run_stage
from paceline.recipe.check import check_paths, check_recipe
from paceline.recipe.load import load_recipe
from paceline.recipe.online import capture_devices, is_on_cpu, training_devices
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.training import require_changeable
from paceline.recipe.write import adopt_recipe, check_run_recipe, is_by_hand, is_run
from paceline.upstream import is_begun, is_cleaned, require_agreement
from paceline.watch.words import command_line, duration

if TYPE_CHECKING:
    from paceline.recipe.stage import Report

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StageArgs:
    """Which recipe, and where the run lies."""

    recipe: Annotated[
        tyro.conf.Positional[Path | None],
        tyro.conf.arg(metavar="[RECIPE.yaml]", help_behavior_hint="(default: that of --run)"),
    ] = None
    """The recipe, as `paceline init` writes it."""
    run: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/ and the recipe's name)"),
    ] = None
    """The run directory; it need not exist yet."""
    overrides: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(name="set", metavar="KEY=VALUE", help_behavior_hint="(repeatable)"),
    ] = ()
    """Change one key of the recipe, such as `train.epochs=3`; once per key."""


@dataclass(frozen=True, kw_only=True)
class TrainArgs(StageArgs):
    """Those of commands that train, too."""

    resume_from: Annotated[
        str | None,
        tyro.conf.arg(metavar="CHECKPOINT", help_behavior_hint="(default: the newest whole one)"),
    ] = None
    """Go on from this checkpoint: its name, such as `step_000600`, or a path. Newer ones are set
    aside, and a training that has ended is taken up again."""
    fork_from: Annotated[
        str | None,
        tyro.conf.arg(metavar="CHECKPOINT", help_behavior_hint="(default: a training of its own)"),
    ] = None
    """Begin this run with a checkpoint of another one, such as
    `runs/old/checkpoints/step_000600`: its weights, optimizer, place in the data, and steps. Both
    have the same features and drafter; settings that differ are recorded."""
    allow_change: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="KEY", help_behavior_hint="(repeatable)"),
    ] = ()
    """Go on from checkpoints that were made with another value of this key, such as
    `train.epochs`; the change is recorded."""


def train_options(args: TrainArgs) -> dict[str, dict[str, Any]]:
    """What was asked of the training beyond its recipe, for `run_stages`.

    Raises RecipeError for a key that cannot change in the middle of one.
    """
    require_changeable(args.allow_change)
    if args.resume_from == "":
        raise UserError("--resume-from: empty. Name a checkpoint, such as step_000600.")
    if args.fork_from == "":
        raise UserError("--fork-from: empty. Name a checkpoint of another run.")
    if args.resume_from and args.fork_from:
        raise UserError(
            "--resume-from and --fork-from: one of them. The first goes on in this run, the second "
            "begins it with a checkpoint of another."
        )
    options = {
        "resume_from": args.resume_from,
        "fork_from": args.fork_from,
        "allow_change": args.allow_change,
    }
    return {"train": {name: value for name, value in options.items() if value}}


def open_run(args: StageArgs, command: str) -> tuple[Recipe, RunDir]:
    """The checked recipe and its run directory, before anything heavy is loaded.

    Raises RecipeError with everything that is wrong with the recipe.
    """
    path = args.recipe
    if path is None:
        if args.run is None:
            raise UserError(
                f"no recipe. Give one (`paceline {command} recipe.yaml`) or a run that has one "
                f"(`paceline {command} --run runs/demo`)."
            )
        path = RunDir(args.run).recipe
        if not path.is_file():
            raise UserError(
                f"{args.run} has no recipe.yaml yet. Give a recipe: "
                f"`{command_line('paceline', command, 'recipe.yaml', '--run', args.run)}`."
            )
        if is_run(args.run):
            check_run_recipe(path)
    try:
        recipe = load_recipe(path, args.overrides)
        check_recipe(recipe)
        # Later stages read what the ones before made of a file: they do not need it itself.
        check_paths(recipe, sources=command in ("run", "prepare"), drafter=command != "score")
        _check_fit(recipe, command)
    except RecipeError as error:
        problems = str(error).splitlines()
        if len(problems) == 1:
            raise
        rows = "\n  ".join(problems)
        raise RecipeError(f"{len(problems)} problems in {path}:\n  {rows}") from error
    return recipe, RunDir(args.run or Path("runs") / recipe.name)


def _check_fit(recipe: Recipe, command: str) -> None:
    from paceline.target.fit import check_fit

    try:
        check_fit(recipe)
    except TargetError:
        if command == "run":
            raise
        # Whichever stage reads it says so.


def run_stages(
    names: Sequence[str],
    recipe: Recipe,
    run_dir: RunDir,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Run stages in order, telling what each did; the exit code. Holds the run directory.

    `options` are those of `run_stage` beyond the recipe, by stage.

    A stage that begins its work puts the recipe into the run directory, and so does the end of all
    stages. One that finds nothing to do, or refuses, leaves the recipe that is there.
    """
    _refuse_other_folders(run_dir)
    _require_devices(names, recipe)
    doing = f"paceline {names[0] if len(names) == 1 else 'run'}"
    with settings_named(settings_of(recipe, run_dir)), owned(run_dir.root, doing) as died:
        _tell_takeover(died)
        return _run_stages(names, recipe, run_dir, options or {})


def _refuse_other_folders(run_dir: RunDir) -> None:
    """Keep a run out of a person's own folder, and out of another run."""
    if is_by_hand(run_dir.recipe):
        raise UserError(
            f"{run_dir.recipe} was not written by a run, and a run would replace it. Choose "
            "another run directory with `--run DIR`."
        )
    outer = next((p for p in run_dir.root.resolve().parents if is_run(p)), None)
    if outer is not None:
        raise UserError(
            f"{run_dir.root} lies inside the run {outer}. Choose another with `--run DIR`."
        )


def _require_devices(names: Sequence[str], recipe: Recipe) -> None:
    """Say before the hours of the first stages that a later one's device is not there."""
    asked: list[tuple[str, str]] = []
    if "train" in names:
        train = recipe.train
        key = "train.drafter_devices" if train.drafter_devices else "train.device"
        asked += [(key, device) for device in training_devices(train)]
        key = "train.target_devices" if train.target_devices else "target.device"
        asked += [(key, device) for device in capture_devices(recipe)]
    here = {"extract", "score"} if recipe.regenerate.servers else {"regenerate", "extract", "score"}
    if here & set(names):
        asked.append(("target.device", recipe.target.device))
    if "extract" in names and recipe.target.devices:
        asked.append(("target.devices", f"cuda:{max(recipe.target.devices)}"))
    for key, device in asked:
        if is_on_cpu(device):
            continue
        import torch

        there = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= there:
            raise RecipeError(
                f"{key}: {device} is not there: torch {torch.__version__} sees {there} CUDA "
                "devices. Give cpu, or install a torch for this machine's GPU."
            )


def _tell_takeover(died: Owner | None) -> None:
    if died is not None:
        _log.info(
            "`%s` (process %d on %s) ended here without a word; going on from what it completed",
            died.doing, died.pid, died.host,
        )  # fmt: skip


def _run_stages(
    names: Sequence[str],
    recipe: Recipe,
    run_dir: RunDir,
    options: Mapping[str, Mapping[str, Any]],
) -> int:
    if not _has_recipe(run_dir):
        adopt_recipe(recipe, run_dir)
    if len(names) > 1:
        require_agreement(recipe, run_dir, allowed=options.get("train", {}).get("allow_change", ()))
    undone: list[str] = []
    # One of them alone does what it is asked for.
    needless = ("extract", "train") if len(names) > 1 and is_cleaned(run_dir) else ()
    if {"resume_from", "fork_from"} & options.get("train", {}).keys():
        needless = ()
    for name in names:
        header(name)
        if name in needless:
            say("nothing to do: the training is complete, and its features were cleaned away.")
            continue
        started = monotonic()
        report = run_stage(name, recipe, run_dir, **options.get(name, {}))
        _tell(report, monotonic() - started)
        if name == "prepare" and "score" in names:
            _require_something_to_score(report)
        undone += [f"{name}: {sentence}" for sentence in report.undone]
        others = names[names.index(name) + 1 :]
        if report.undone and others and is_begun(name, run_dir):
            # They would refuse, as if something impossible had been asked for.
            undone.append(f"{', '.join(others)}: not begun, because {name} has parts not done.")
            break
    if len(names) == len(STAGES):
        adopt_recipe(recipe, run_dir)
    if undone:
        say("not done: " + "\nnot done: ".join(undone))
        return 1
    return 0


def _has_recipe(run_dir: RunDir) -> bool:
    """Whether the run has a recipe, as it was written."""
    try:
        check_run_recipe(run_dir.recipe)
    except (OSError, IntegrityError):
        return False
    return is_run(run_dir.root)


def _require_something_to_score(report: "Report") -> None:
    """Say before the hours of the other stages what the last one would say after them."""
    samples: dict[str, int] = report.numbers.get("samples", {})
    if samples and not samples.get("validation") and not samples.get("heldout"):
        raise DataError(
            f"none of {samples.get('train', 0)} prompts fell into the validation split, and no "
            "source has `split: heldout`: there would be nothing to score. Raise "
            "corpus.validation_fraction or give such a source, with a new run directory "
            "(`--run DIR`)."
        )


def _tell(report: "Report", seconds: float) -> None:
    if report.skipped and not any("nothing to do" in line for line in report.lines):
        say(f"nothing to do: {report.stage} is complete and its files are as they were written.")
    for line in report.lines:
        say(line)
    if not report.skipped:
        say(f"({duration(seconds)})")
