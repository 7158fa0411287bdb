"""How messages put things: counts, methods in order, commands to copy."""

import shlex
from collections.abc import Iterable
from pathlib import Path


def counted(count: int, noun: str) -> str:
    """Such as `1 row`, `1,234 rows`, `2 processes`; `noun` is the singular."""
    return f"{count:,} {named(count, noun)}"


def named(count: int, noun: str) -> str:
    """The noun alone, in the plural unless the count is 1."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def command_line(*words: str | Path) -> str:
    """A command as a shell takes it, whatever characters its paths have."""
    return shlex.join(map(str, words))


def ordered(methods: Iterable[str]) -> list[str]:
    """Method names: `chain`, then trees by rising budget, then what else there is."""

    def key(name: str) -> tuple[int, int, str]:
        head, _, budget = name.rpartition("-")
        if name == "chain":
            return (0, 0, name)
        return (1, int(budget), head) if budget.isdecimal() else (2, 0, name)

    return sorted(methods, key=key)
