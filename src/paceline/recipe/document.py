"""YAML text to plain values, with the line of every key.

Differs from PyYAML's own loader where that one surprises: `1e-4` is a number (YAML 1.2), and a key
that stands twice in one mapping is an error instead of the last one winning in silence.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.durable.errors import RecipeError

_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    pass


def know_exponents(kind: Any) -> None:
    """Have a PyYAML loader or dumper take `1e-4` for a number; both must agree."""
    kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+.0123456789"))


know_exponents(_Loader)


@dataclass(frozen=True)
class Document:
    """A parsed YAML text."""

    value: Any
    lines: dict[str, int]
    """1-based line of each dotted key, such as `corpus.sources.0.path`."""


def parse(text: str | bytes, origin: str) -> Document:
    """Parse one YAML document of plain values.

    Raises RecipeError, naming `origin` and the line, for text that is not YAML, for a key that
    stands twice in one mapping, and for an alias that contains itself.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return Document(None, lines)
            _index(node, "", lines, origin, ())
            return Document(loader.construct_document(node), lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        raise RecipeError(
            f"{where}: not valid YAML ({error.problem or error.context}). "
            "Check indentation, colons and quotes there."
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{origin}: not valid YAML ({reason}).") from error


def _index(
    node: yaml.Node, prefix: str, lines: dict[str, int], origin: str, above: tuple[int, ...]
) -> None:
    if id(node) in above:
        line = node.start_mark.line + 1
        raise RecipeError(f"{origin}, line {line}: {prefix}: an alias that contains itself.")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, item in node.value:
            name = str(key.value)
            path = f"{prefix}.{name}" if prefix else name
            line = key.start_mark.line + 1
            if name in seen and name != "<<":
                raise RecipeError(
                    f"{origin}, line {line}: {path} stands twice, first in line {seen[name]}. "
                    "Remove one of them."
                )
            seen[name] = lines[path] = line
            _index(item, path, lines, origin, above)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            path = f"{prefix}.{number}"
            lines[path] = item.start_mark.line + 1
            _index(item, path, lines, origin, above)
