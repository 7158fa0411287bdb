"""Paceline trains speculative-decoding drafters and keeps going when things around it break.

The names below are the public Python API; each is imported when it is first used, so that
`import paceline` costs nothing and loads no torch::

    from pathlib import Path
    import paceline

    recipe = paceline.load_recipe(Path("recipe.yaml"), ["train.epochs=3"])
    paceline.check_recipe(recipe)
    paceline.check_paths(recipe)
    run_dir = paceline.RunDir(Path("runs/demo"))
    for name, _ in paceline.STAGES:
        report = paceline.run_stage(name, recipe, run_dir)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.durable.errors import PacelineError, RecipeChanged, RecipeError, UserError
    from paceline.pipeline import STAGES, run_stage
    from paceline.recipe.check import check_paths, check_recipe
    from paceline.recipe.load import load_recipe
    from paceline.recipe.run_dir import RunDir
    from paceline.recipe.schema import Recipe
    from paceline.recipe.stage import Report
    from paceline.recipe.write import write_recipe

__version__ = "0.1.0"

__all__ = [
    "STAGES",
    "PacelineError",
    "Recipe",
    "RecipeChanged",
    "RecipeError",
    "Report",
    "RunDir",
    "UserError",
    "__version__",
    "check_paths",
    "check_recipe",
    "load_recipe",
    "run_stage",
    "write_recipe",
]


def _home(name: str) -> str | None:
    match name:
        case "PacelineError" | "RecipeChanged" | "RecipeError" | "UserError":
            return "paceline.durable.errors"
        case "STAGES" | "run_stage":
            return "paceline.pipeline"
        case "check_paths" | "check_recipe":
            return "paceline.recipe.check"
        case "load_recipe":
            return "paceline.recipe.load"
        case "write_recipe":
            return "paceline.recipe.write"
        case "Recipe":
            return "paceline.recipe.schema"
        case "RunDir":
            return "paceline.recipe.run_dir"
        case "Report":
            return "paceline.recipe.stage"
    return None


def __getattr__(name: str) -> Any:
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
