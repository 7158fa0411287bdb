from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny_models
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import Target, load_target


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each kind's default tiny model, made once; not to be changed."""
    root, made = tmp_path_factory.mktemp("tiny"), {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_models.tiny_model(kind, root / kind)
        return made[kind]

    return folder


@pytest.fixture
def tiny_target(tiny_folder: Callable[[str], Path]) -> Callable[..., Target]:
    """A freshly loaded target of a kind, fp32 unless said otherwise."""
    return lambda kind, **fields: load_target(TargetRecipe(path=str(tiny_folder(kind)), **fields))
