"""Plain values to frozen dataclasses, strictly; every problem found is reported, in words."""

import dataclasses
import difflib
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from paceline.recipe.schema import Recipe


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one key."""

    key: str
    """Dotted, such as `corpus.sources.0.path`."""
    text: str
    """What is wrong and what to do."""


def convert_recipe(value: Any) -> tuple[Recipe | None, list[Problem]]:
    """Convert nested plain values into a Recipe; keys that are absent take their defaults.

    Returns the recipe with no problems, or None with all that were found. A section that is
    there but empty (`train:` with nothing under it) takes its defaults.
    """
    problems: list[Problem] = []
    converted = _section(value, Recipe, "", problems)
    return (None if problems else converted), problems


def known_keys(kind: Any = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the schema; an item of a list of sections is written `0`."""
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        key = f"{prefix}{name}"
        item = _item_section(hint)
        if dataclasses.is_dataclass(hint):
            keys += [key, *known_keys(hint, f"{key}.")]
        elif item is not None:
            keys += [key, *known_keys(item, f"{key}.0.")]
        else:
            keys.append(key)
    return keys


def in_words(hint: Any) -> str:
    """A type as a reader of a recipe would say it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(str, args)) if len(args) < 3 else f"one of {_enumerate(args)}"
    if origin in (Union, types.UnionType):
        plain = [a for a in args if a is not type(None)]
        return f"{' or '.join(map(in_words, plain))}, or null"
    if origin is tuple:
        if get_origin(args[0]) is Literal:
            return f"a list, each item {in_words(args[0])}"
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {_plural(args[0])}"
        return f"a list of {len(args)} {_plural(args[0])}"
    if origin is dict:
        return "a mapping (`name: value` lines)"
    if dataclasses.is_dataclass(hint):
        return "a section (`key: value` lines)"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint]


def closest(name: str, candidates: list[str]) -> str | None:
    """The candidate that `name` was most likely meant to be."""
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return found[0] if found else None


def _section(value: Any, kind: type, key: str, problems: list[Problem]) -> Any:
    value = {} if value is None else value
    if not isinstance(value, dict):
        problems.append(Problem(key, f"expected {in_words(kind)}, got {_given(value)}."))
        return None
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    before = len(problems)
    for name, item in value.items():
        path = f"{key}.{name}" if key else str(name)
        if not isinstance(name, str) or name not in hints:
            problems.append(Problem(path, f"unknown key. {_suggestion(str(name), key, hints)}"))
        else:
            found[name] = _value(item, hints[name], path, problems)
    for name in _required(kind):
        if name not in value:
            path = f"{key}.{name}" if key else name
            problems.append(Problem(path, f"missing; expected {in_words(hints[name])}."))
    return kind(**found) if len(problems) == before else None


def _value(value: Any, hint: Any, key: str, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _section(value, hint, key, problems)
    item = _item_section(hint)
    if item is not None:
        if not isinstance(value, (list, tuple)):
            problems.append(
                Problem(key, f"expected a list of sections (`- ` items), got {_given(value)}.")
            )
            return None
        return tuple(_section(v, item, f"{key}.{i}", problems) for i, v in enumerate(value))
    try:
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        text = f"expected {in_words(hint)}, got {_given(value)}."
        problems.append(Problem(key, text + _hint(value, hint)))
        return None


def _required(kind: Any) -> list[str]:
    return [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def _item_section(hint: Any) -> Any:
    """The dataclass in `tuple[Dataclass, ...]`, or None."""
    args = get_args(hint)
    if get_origin(hint) is tuple and dataclasses.is_dataclass(args[0]):
        return args[0]
    return None


def _suggestion(name: str, key: str, hints: dict[str, Any]) -> str:
    prefix = f"{key}." if key else ""
    sibling = closest(name, list(hints))
    if sibling:
        return f"Did you mean {prefix}{sibling}?"
    # A key in the wrong section is as common a slip as a misspelt one.
    everywhere = known_keys()
    last_parts = [k.rpartition(".")[2] for k in everywhere]
    near = closest(name, last_parts)
    if near:
        homes = [k for k, last in zip(everywhere, last_parts, strict=True) if last == near]
        return f"Did you mean {_enumerate(homes, ' or ')}?"
    return f"Known here: {', '.join(hints)}."


def _hint(value: Any, hint: Any) -> str:
    origin = get_origin(hint)
    if hint is str and value is not None and not isinstance(value, (str, list, dict)):
        return " Put it in quotes."
    if origin is dict and isinstance(value, dict):
        return " Its names must be text: put them in quotes."
    if origin is Literal and isinstance(value, str):
        near = closest(value, list(map(str, get_args(hint))))
        return f" Did you mean {near}?" if near else ""
    if origin is tuple and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f" Write [{value}]."
    if isinstance(value, str) and value and _takes_number(hint) and _is_number(value):
        return " Remove the quotes."
    return ""


def _takes_number(hint: Any) -> bool:
    return hint in (int, float) or any(a in (int, float) for a in get_args(hint))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _given(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = value if len(value) <= 40 else value[:40] + "…"
        return f'the text "{short}"'
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple, set)):
        short = ", ".join(map(str, value))
        return f"the list [{short}]" if len(short) <= 40 else f"a list of {len(value)}"
    if isinstance(value, (int, float)):
        return str(value) if isinstance(value, float) or abs(value) < 10**30 else "a huge number"
    return f"{value} (a {type(value).__name__})"


def _plural(hint: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(hint, "sections")


def _enumerate(items: Any, glue: str = ", ") -> str:
    return glue.join(map(str, items))
