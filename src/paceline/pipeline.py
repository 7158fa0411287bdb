"""The stages of a run, in order, and the one way to run one of them."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.durable.errors import UserError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.upstream import require_inputs
from paceline.watch.events import EventWriter

if TYPE_CHECKING:
    from paceline.recipe.stage import Report

STAGES: tuple[tuple[str, str], ...] = (
    ("prepare", "paceline.corpus.stage"),
    ("regenerate", "paceline.corpus.regenerate"),
    ("extract", "paceline.extract.stage"),
    ("train", "paceline.train.stage"),
    ("score", "paceline.score.stage"),
)
"""Names with the modules whose `run(recipe, run_dir) -> Report` does the work."""


def run_stage(
    name: str,
    recipe: Recipe,
    run_dir: RunDir,
    *,
    resume_from: str | None = None,
    fork_from: str | None = None,
    allow_change: Sequence[str] = (),
    shard: str | None = None,
    accept_code: bool = False,
    ask_again: Sequence[str] = (),
) -> "Report":
    """Run one stage; what is done already and verified is left as it is.

    `resume_from`, `fork_from` and `allow_change` are those of `paceline train`, `shard` and
    `accept_code` those of `paceline extract`, `ask_again` that of `paceline regenerate`; other
    stages take no notice.

    The recipe is taken as it stands: `check_recipe` and `check_paths` come first. Raises UserError
    for an unknown name, and what the stage raises: RecipeChanged where artefacts of another recipe
    stand in the run directory, and what `require_inputs` raises about the stages before it.
    """
    for stage, module in STAGES:
        if stage == name:
            # A refusal is told, like what the stage itself refuses.
            with EventWriter(run_dir.events, name):
                require_inputs(name, recipe, run_dir)
            options = {
                "train": {
                    "resume_from": resume_from,
                    "fork_from": fork_from,
                    "allow_change": allow_change,
                },
                "regenerate": {"ask_again": ask_again},
                "extract": {"shard": shard, "accept_code": accept_code},
            }
            work = importlib.import_module(module).run
            asked = {key: value for key, value in options.get(name, {}).items() if value}
            report: Report = work(recipe, run_dir, **asked)
            if report.skipped:
                with EventWriter(run_dir.events, name) as events:
                    events.emit("skipped")
            return report
    raise UserError(f"no stage {name!r}. Stages: {', '.join(stage for stage, _ in STAGES)}.")
