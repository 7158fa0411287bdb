"""The paths that a run will read and write, by what they are for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.durable.open_store import local_path
from paceline.durable.staging import SHARED_MEMORY
from paceline.recipe.data_files import data_path
from paceline.recipe.extract_inputs import is_object_store
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import name_of


@dataclass(frozen=True)
class Place:
    """One of them."""

    role: str
    """The recipe's key, or `run directory`, `recipe`."""
    path: Path
    """Absolute."""
    kind: Literal["file", "folder"]
    written: bool = False
    """Whether the run writes there; it makes what is missing. All others must exist."""
    is_memory_fine: bool = False
    """Whether what lies there may be lost."""


def places(recipe: Recipe, recipe_path: Path, run_dir: RunDir) -> tuple[Place, ...]:
    """All of them, in the order of the recipe; empty paths are left out."""
    return tuple(_places(recipe, recipe_path.absolute(), run_dir.root.absolute()))


def local_store(recipe: Recipe) -> Path | None:
    """The folder that `extract.store` names; None where it names none, or a bucket."""
    store = recipe.extract.store
    if not store or is_object_store(store):
        return None
    return local_path(store).expanduser().absolute()


def staging_folders(recipe: Recipe, run_dir: RunDir) -> tuple[Path, ...]:
    """Where shards wait for their upload, the first choice first; none without an object store."""
    if not is_object_store(recipe.extract.store):
        return ()
    if recipe.extract.staging == "auto":
        return SHARED_MEMORY, run_dir.staging.absolute()
    return Path(recipe.extract.staging).expanduser().absolute(), run_dir.staging.absolute()


def _places(recipe: Recipe, recipe_path: Path, root: Path) -> Iterator[Place]:
    yield Place("recipe", recipe_path, "file")
    yield Place("run directory", root, "folder", written=True)
    if recipe.target.path:
        yield Place("target.path", Path(recipe.target.path), "folder")
    for source in recipe.corpus.sources:
        path = data_path(source.path) if source.path else None
        if path is not None:
            kind = "folder" if path.is_dir() else "file"
            yield Place(f"corpus source {name_of(source)}", path, kind)
    store = local_store(recipe)
    if store is not None:
        yield Place("extract.store", store, "folder", written=True)
    for folder in staging_folders(recipe, RunDir(root))[:1]:
        yield Place("extract.staging", folder, "folder", written=True, is_memory_fine=True)
    if recipe.drafter.warm_start:
        yield Place("drafter.warm_start", Path(recipe.drafter.warm_start), "folder")
    for text in recipe.drafter.vocab_text:
        if text:
            yield Place("drafter.vocab_text", Path(text), "file")
