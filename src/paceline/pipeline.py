"""The stages of a run, in order, and the one way to run one of them."""

import importlib
from typing import TYPE_CHECKING

from paceline.durable.errors import UserError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.upstream import require_inputs

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


def run_stage(name: str, recipe: Recipe, run_dir: RunDir) -> "Report":
    """Run one stage; what is done already and verified is left as it is.

    The recipe is taken as it stands: `check_recipe` and `check_paths` come first. Raises UserError
    for an unknown name, and what the stage raises: RecipeChanged where artefacts of another recipe
    stand in the run directory, and what `require_inputs` raises about the stages before it.
    """
    for stage, module in STAGES:
        if stage == name:
            require_inputs(name, recipe, run_dir)
            return importlib.import_module(module).run(recipe, run_dir)
    raise UserError(f"no stage {name!r}. Stages: {', '.join(stage for stage, _ in STAGES)}.")
