"""A Recipe to YAML: plain for the run directory, commented for a person to edit."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import IntegrityError
from paceline.durable.fs import remove_dead_partials, write_atomic
from paceline.recipe.document import know_exponents
from paceline.recipe.load import resolve_paths
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.watch.words import command_line

_WIDTH = 96

_CHECKSUM = "# CRC64NVME of all below: "

RUN_MARK = "# The recipe of this run, every default spelt out. Written by paceline: do not edit.\n"
"""First line of a run directory's recipe: how it is told from one that a person wrote."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory: holds a recipe that a command wrote."""
    try:
        with (folder / "recipe.yaml").open("rb") as file:
            return file.readline() == RUN_MARK.encode()
    except OSError:
        return False


def is_by_hand(path: Path) -> bool:
    """Whether a file is a recipe that a person wrote; a damaged one of a run is not."""
    try:
        text = path.read_text(encoding="utf-8")
        return not text.startswith(RUN_MARK) and isinstance(yaml.safe_load(text), dict)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def recipe_yaml(recipe: Recipe) -> str:
    """Every key with its value, paths absolute; equal recipes give equal text."""
    builtins = _lists(msgspec.to_builtins(resolve_paths(recipe)))
    body = yaml.dump(builtins, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    return f"{RUN_MARK}{_CHECKSUM}{_sum(body)}\n{body}"


def check_run_recipe(path: Path) -> None:
    """Raise IntegrityError unless a run's recipe is as it was written.

    With nothing else given, it alone decides what the stages do that have not begun.
    """
    mark, _, rest = path.read_bytes().partition(_CHECKSUM.encode())
    stated, _, body = rest.partition(b"\n")
    # Without the line it is of an older Paceline.
    if not rest or (mark == RUN_MARK.encode() and stated.decode("ascii", "replace") == _sum(body)):
        return
    flag = command_line("--run", path.parent)
    raise IntegrityError(
        f"{path}: not as it was written: damaged, or edited by hand. Give the recipe that you "
        f"mean as a file of its own beside `{flag}`; a copy of this one will do, without its "
        "first two lines."
    )


def _sum(body: str | bytes) -> str:
    return crc64_hex(crc64(body.encode() if isinstance(body, str) else body))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the fully resolved recipe, atomically and durably."""
    write_atomic(path, recipe_yaml(recipe).encode())


def adopt_recipe(recipe: Recipe, run_dir: RunDir) -> None:
    """Make this the recipe of the run directory; for a stage, before it begins its work.

    Whatever ends the stage, the run directory alone then tells how to go on. A stage that finds
    nothing to do, or refuses, leaves the recipe as it was. What killed processes left half-written
    beside it is removed.
    """
    remove_dead_partials(run_dir.root)
    text = recipe_yaml(recipe).encode()
    if not run_dir.recipe.exists() or run_dir.recipe.read_bytes() != text:
        write_atomic(run_dir.recipe, text)


def template(recipe: Recipe) -> str:
    """YAML with each key's documentation as comments above it; `load_recipe` reads it back."""
    return "\n".join(_section(recipe, "")) + "\n"


def field_docs(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, as one paragraph; a field without one is absent."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    docs: dict[str, str] = {}
    for node, after in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[node.target.id] = " ".join(after.value.value.split())
    return docs


def _section(section: Any, indent: str) -> Iterator[str]:
    docs = field_docs(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield ""
            yield from _comment(inspect.getdoc(type(value)) or "", indent)
            yield f"{indent}{field.name}:"
            yield from _section(value, indent + "  ")
            continue
        yield from _comment(docs.get(field.name, "") + _choices(field.type), indent)
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield f"{indent}{field.name}:"
            for number, item in enumerate(value):
                yield from _item(item, indent + "  ", commented=number == 0)
        else:
            yield f"{indent}{field.name}: {_scalar(value)}"


def _choices(kind: Any) -> str:
    if get_origin(kind) is not Literal or len(get_args(kind)) < 2:
        return ""
    return f" One of {', '.join(map(str, get_args(kind)))}."


def _item(item: Any, indent: str, *, commented: bool) -> Iterator[str]:
    """One `- ` item; the docs stand above the first alone, once for the whole list."""
    lines = list(_section(item, indent + "  "))
    is_comment = [line.lstrip().startswith("#") for line in lines]
    first = is_comment.index(False)
    lines[:first] = [indent + line.lstrip() for line in lines[:first]]
    lines[first] = f"{indent}- {lines[first].lstrip()}"
    for line, comment in zip(lines, is_comment, strict=True):
        if commented or not comment:
            yield line


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _scalar(value: Any) -> str:
    text = yaml.dump(
        _lists(value),
        Dumper=_Dumper,
        default_flow_style=True,
        allow_unicode=True,
        width=2**31,
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Keeps every scalar on one line, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
know_exponents(_Dumper)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return value
