"""The recipe: what every command would refuse about its values."""

from collections.abc import Iterator

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import World
from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_recipe

_FIND = Finder("recipe")


def check(world: World) -> Iterator[Finding]:
    """A finding for each value, or combination of values, that is impossible."""
    try:
        check_recipe(world.recipe)
    except RecipeError as error:
        for line in str(error).splitlines():
            yield _FIND.error(
                line, "every command would refuse the recipe", f"edit {world.recipe_path}"
            )
    else:
        yield _FIND.ok("every value is possible, and they fit together")
