"""The objectives that are compared: each is the demo's recipe with other keys of `train`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.recipe.check import check_recipe
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.schema import Recipe

_STAGE_2 = 0.85
"""Share of the samples after which `stage12` has its second stage."""


_COMMON = {"gamma": 2.0, "schedule": "cosine"}
"""Of arms that say nothing else: the demo's own are those of its objective."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    name: str
    objective: tuple[ObjectiveTerm, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of `train`."""

    def of(self, recipe: Recipe, **own: Any) -> Recipe:
        """The demo's recipe, changed. Raises RecipeError where a key is refused."""
        changes = {**_COMMON, **self.changes, **own}
        train = replace(recipe.train, objective=self.objective, **changes)
        changed = replace(recipe, train=train)
        check_recipe(changed)
        return changed


ARMS = (
    Arm(name="ce-gamma"),
    Arm(
        name="dpace",
        objective=(ObjectiveTerm(kind="cross_entropy", positions="streak", alpha=0.5),),
    ),
    Arm(
        name="stage12",
        objective=(
            ObjectiveTerm(
                kind="cross_entropy",
                positions="streak",
                alpha=0.5,
                end_weight=0.5,
                ramp=(_STAGE_2, _STAGE_2),
            ),
            ObjectiveTerm(
                kind="lk_hybrid",
                eta=3.0,
                weight=0.0,
                end_weight=0.5,
                ramp=(_STAGE_2, _STAGE_2),
            ),
        ),
        changes={"schedule": "wsd", "decay_ratio": 0.2},
    ),
    Arm(
        name="tree",
        objective=(ObjectiveTerm(kind="cross_entropy", positions="tree", budget=64),),
    ),
    Arm(
        # Far outside of the tree its gradient vanishes: cross-entropy alone has to come first.
        name="tree-depth",
        objective=(
            ObjectiveTerm(kind="cross_entropy", end_weight=0.25, ramp=(0.25, 0.5)),
            ObjectiveTerm(kind="tree", budget=64, weight=0.0, end_weight=1.0, ramp=(0.25, 0.5)),
        ),
    ),
    Arm(
        name="recipe",
        objective=(
            ObjectiveTerm(kind="cross_entropy", positions="streak_decay", weight=0.85),
            ObjectiveTerm(kind="kl", temperature=2.0, weight=0.15),
            ObjectiveTerm(kind="confident_right", weight=0.1),
        ),
        changes={"noise": "uniform", "noise_start": 0.05, "noise_end": 0.01},
    ),
)
"""The first is what the others are compared with."""


def arms_named(names: str) -> tuple[Arm, ...]:
    """Those in a list with commas, in the order of ARMS; all of them where it is empty.

    Raises ValueError for a name that none has.
    """
    asked = names.split(",") if names else [arm.name for arm in ARMS]
    unknown = set(asked) - {arm.name for arm in ARMS}
    if unknown:
        known = ", ".join(arm.name for arm in ARMS)
        raise ValueError(f"--arms: no arm {', '.join(sorted(unknown))}. There are {known}.")
    return tuple(arm for arm in ARMS if arm.name in asked)
