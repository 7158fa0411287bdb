from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drafting import load_tiny_target
from online_runs import toy_training
from paceline.extract import stage as extract_stage
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.target.load import Target


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> tuple[Recipe, Path, Target]:
    """A tiny target, and a run whose features are extracted: 24 samples, 4 of them validation."""
    root = tmp_path_factory.mktemp("world")
    target = load_tiny_target(root)
    recipe, run_dir = toy_training(target, root / "run")
    extract_stage.run(recipe, run_dir)
    return recipe, run_dir.root, target


@pytest.fixture
def fresh_run(world, tmp_path) -> Callable[..., tuple[Recipe, RunDir]]:
    """A run of its own over the same features; keywords replace train fields."""
    recipe, root, _ = world
    made = 0

    def make(**changes: object) -> tuple[Recipe, RunDir]:
        nonlocal made
        made += 1
        run = RunDir(tmp_path / f"run{made}")
        run.root.mkdir()
        for name in ("corpus", "features"):
            (run.root / name).symlink_to(root / name)
        return replace(recipe, train=replace(recipe.train, **changes)), run

    return make
