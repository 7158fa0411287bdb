"""A training that signals itself at a chosen moment, in a process of its own."""

import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.durable.errors import Interrupted
from paceline.durable.fs import RealFileSystem
from paceline.flow.signals import sigterm_raises
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import StageRecord
from paceline.train import checkpoint, evaluate, kept, learner, loop, stage


@dataclass(frozen=True)
class Moment:
    """The `number`-th call of a function, from 1, of those that `counts` takes."""

    where: Any
    name: str
    number: int = 1
    counts: Callable[..., bool] = lambda *_, **__: True
    at_end: bool = False
    """When the call has ended, not when it begins."""


def _of_a_checkpoint(_fs: Any, source: Path, _target: Path) -> bool:
    return source.name.startswith("step_")


def _of_an_evaluation(_fs: Any, _source: Path, target: Path) -> bool:
    return target.name == "evaluation.json"


# With 4 validation samples, 3 evaluations beside the first, and 3 micro-batches a step.
MOMENTS = {
    "start": Moment(stage, "newest_checkpoint"),
    "first evaluation": Moment(evaluate, "accepted_depths", 2),
    "first step": Moment(learner, "block_loss", 2),
    "step": Moment(learner, "block_loss", 3 * 7 + 2),
    "weights of a checkpoint": Moment(checkpoint, "save_drafter", 2, at_end=True),
    "state of a checkpoint": Moment(checkpoint, "write_atomic", 4 + 3),
    "rename of a checkpoint": Moment(RealFileSystem, "replace", 2, _of_a_checkpoint),
    "checkpoint written": Moment(RealFileSystem, "replace", 2, _of_a_checkpoint, at_end=True),
    "evaluation": Moment(evaluate, "accepted_depths", 4 + 2),
    "end of an evaluation": Moment(loop, "write_evaluation", 2),
    "rename of an evaluation": Moment(RealFileSystem, "replace", 2, _of_an_evaluation),
    "removal of a checkpoint": Moment(kept, "_remove", at_end=True),
    "last evaluation": Moment(evaluate, "accepted_depths", 4 * 3 + 2),
    "choice of the best": Moment(stage, "best_checkpoint"),
    "record of the end": Moment(StageRecord, "finish"),
}


def train(recipe: Recipe, run_dir: RunDir, moment: str = "", number: int = 0) -> int:
    """Train in a process that sends itself signal `number` at the moment; its exit code.

    Whatever it ends by, the process writes to the file `log` of the run directory.
    """
    # Forked from one that has imported everything and holds no thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.train.stage", "torch._dynamo"])
    process = context.Process(target=_train, args=(recipe, run_dir, moment, number))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _train(recipe: Recipe, run_dir: RunDir, moment: str, number: int) -> None:
    logging.basicConfig(filename=run_dir.root / "log", level=logging.INFO)
    if moment:
        _arm(MOMENTS[moment], number)
    try:
        with sigterm_raises():
            stage.run(recipe, run_dir)
    except Interrupted as stopped:
        raise SystemExit(stopped.exit_code) from stopped


def _arm(moment: Moment, number: int) -> None:
    original = getattr(moment.where, moment.name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += moment.counts(*args, **kwargs)
        is_now = calls == moment.number and moment.counts(*args, **kwargs)
        if is_now and not moment.at_end:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if is_now and moment.at_end:
            os.kill(os.getpid(), number)
        return result

    setattr(moment.where, moment.name, call)
