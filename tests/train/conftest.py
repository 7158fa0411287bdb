from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafting import TAPS, load_tiny_target
from paceline.extract import stage as extract_stage
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.target.load import Target
from paceline.types.sample import Sample, Split, encode_sample


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> tuple[Recipe, Path, Target]:
    """A tiny target, and a run whose features are extracted: 24 samples, 4 of them validation."""
    root = tmp_path_factory.mktemp("world")
    target = load_tiny_target(root)
    recipe = Recipe(
        target=TargetRecipe(path=str(target.folder)),
        corpus=CorpusRecipe(max_length=64),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(taps=TAPS, batch_tokens=256, dtype="float32"),
        drafter=DrafterRecipe(layers=1, block_size=4),
        train=TrainRecipe(
            epochs=2.0,
            anchors=8,
            gamma=4.0,
            batch_samples=3,
            micro_batch_tokens=96,
            learning_rate=1e-3,
            evaluations=3,
            eval_samples=4,
            threads=1,
        ),
    )
    run_dir = RunDir(root / "run")
    run_dir.corpus.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    with run_dir.prepared.open("wb") as file:
        for number in range(24):
            length = int(torch.randint(16, 40, (1,), generator=generator))
            ids = torch.randint(0, 256, (length,), generator=generator).tolist()
            file.write(
                encode_sample(
                    Sample(
                        sample_id=f"{number:032x}",
                        prompt_id=f"{number:032x}",
                        source="toy",
                        split=Split.VALIDATION if number % 6 == 5 else Split.TRAIN,
                        messages=[],
                        input_ids=ids,
                        loss_spans=[(6, length)],
                    )
                )
            )
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
