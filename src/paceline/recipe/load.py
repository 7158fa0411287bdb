"""A recipe file and `--set` overrides to a Recipe."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import RecipeError
from paceline.recipe.convert import Problem, convert_recipe
from paceline.recipe.document import parse
from paceline.recipe.hub import absolute_hub, is_hub
from paceline.recipe.schema import Recipe


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe, apply `a.b=c` overrides in order, and make its paths absolute.

    The value of an override is YAML, so `regenerate.enabled=false`, `train.betas=[0.9, 0.99]`
    and `extract.taps=null` mean what they say; a number in the key is a place in a list
    (`corpus.sources.0.limit=5`). Relative paths are relative to the current directory. Values are
    checked for their type alone; `check_recipe` judges what they say.

    Raises RecipeError that lists every unknown key and wrong type with its line.
    """
    document = parse(_read(path), str(path))
    if document.value is None:
        raise RecipeError(f"{path}: empty. `paceline init` writes a recipe to start from.")
    if not isinstance(document.value, dict):
        raise RecipeError(
            f"{path}: not a recipe: expected `key: value` lines at the top, such as `name: demo`."
        )
    recipe, problems = convert_recipe(document.value)
    if recipe is None:
        raise RecipeError(_report(str(path), problems, document.lines))
    return resolve_paths(with_overrides(recipe, overrides))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with `a.b=c` overrides applied in order. Raises RecipeError as `load_recipe`."""
    for override in overrides:
        recipe = _override(recipe, override)
    return recipe


def resolve_paths(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, `~` expanded; an empty path stays empty."""
    sources = tuple(dataclasses.replace(s, path=_data(s.path)) for s in recipe.corpus.sources)
    scored = tuple(dataclasses.replace(s, path=_data(s.path)) for s in recipe.score.datasets)
    asked = recipe.extract
    store = asked.store if "://" in asked.store else _absolute(asked.store)
    staging = asked.staging if asked.staging == "auto" else _absolute(asked.staging)
    warm_start, template_file = recipe.drafter.warm_start, recipe.corpus.template_file
    template_file = None if template_file is None else _absolute(template_file)
    drafter = dataclasses.replace(
        recipe.drafter,
        warm_start=None if warm_start is None else _absolute(warm_start),
        vocab_text=tuple(map(_absolute, recipe.drafter.vocab_text)),
    )
    return dataclasses.replace(
        recipe,
        drafter=drafter,
        target=dataclasses.replace(recipe.target, path=_absolute(recipe.target.path)),
        corpus=dataclasses.replace(recipe.corpus, sources=sources, template_file=template_file),
        extract=dataclasses.replace(asked, store=store, staging=staging),
        score=dataclasses.replace(recipe.score, datasets=scored),
    )


def _data(path: str) -> str:
    return absolute_hub(path) if is_hub(path) else _absolute(path)


def _absolute(path: str) -> str:
    if not path:
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise RecipeError(f"{path}: {error} Write the folder out.") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RecipeError(
            f"{path}: no such recipe. `paceline init --target DIR --data FILE` writes one."
        ) from error
    except IsADirectoryError as error:
        raise RecipeError(
            f"{path}: a folder, not a recipe. To go on with a run, give it as `--run {path}`."
        ) from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error


def _report(origin: str, problems: list[Problem], lines: dict[str, int]) -> str:
    rows = []
    for problem in problems:
        # A key that is missing has no line of its own: the nearest section above it has.
        key = problem.key
        while key and key not in lines:
            key = key.rpartition(".")[0]
        line = lines.get(key)
        where = f"{origin}, line {line}" if line else origin
        rows.append(f"{where}: {problem.key}: {problem.text}")
    return "\n".join(rows)


def _override(recipe: Recipe, override: str) -> Recipe:
    """Set one key; going through the plain form lets the one converter judge the outcome."""
    origin = f"--set {override}"
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"{origin}: expected KEY=VALUE, such as train.epochs=3.")
    tree = _plain(msgspec.to_builtins(recipe))
    _assign(tree, parts, parse(text, origin).value, origin)
    changed, problems = convert_recipe(tree)
    if changed is None:
        raise RecipeError(_report(origin, problems, {}))
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _assign(tree: Any, parts: list[str], value: Any, origin: str) -> None:
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        above = ".".join(parts[:depth])
        if isinstance(tree, list):
            if not part.isdecimal() or int(part) >= len(tree):
                places = f"0 to {len(tree) - 1}" if tree else "none: it is empty"
                raise RecipeError(f"{origin}: {part} is no place in the list {above} ({places}).")
            index: Any = int(part)
        elif isinstance(tree, dict):
            index = part
        else:
            raise RecipeError(
                f"{origin}: {above} has no keys or places under it; set it as a whole."
            )
        if is_last:
            tree[index] = value
        elif isinstance(tree, dict):
            # An unknown section is made here, for the converter to name it with a suggestion.
            tree = tree.setdefault(index, {})
        else:
            tree = tree[index]
