"""The recipe: what every command would refuse about its values, alone and beside its target."""

from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import World
from paceline.durable.errors import RecipeError, TargetError
from paceline.recipe.check import check_recipe
from paceline.target.fit import fit_notes, shape_problems
from paceline.target.spec import TargetSpec, read_spec

_FIND = Finder("recipe")


def check(world: World) -> Iterator[Finding]:
    """A finding for each value, or combination of values, that is impossible."""
    problems: list[str] = []
    try:
        check_recipe(world.recipe)
    except RecipeError as error:
        problems += str(error).splitlines()
    spec = _spec(world)
    if spec is not None:
        problems += shape_problems(world.recipe, spec)
        for note in fit_notes(world.recipe, spec):
            yield _FIND.warning(
                note,
                "the stages before would have been done for nothing",
                f"edit {world.recipe_path}",
            )
    for problem in problems:
        yield _FIND.error(
            problem, "every command would refuse the recipe", f"edit {world.recipe_path}"
        )
    if not problems:
        beside = " and the target" if spec is not None else ""
        yield _FIND.ok(f"every value is possible, and they fit together{beside}")


def _spec(world: World) -> TargetSpec | None:
    """None where it cannot be read: `vocabulary` and `paths` say why."""
    path = Path(world.recipe.target.path)
    if not world.answers_at(path):
        return None
    try:
        return read_spec(path, identify=False)
    except (TargetError, OSError):
        return None
