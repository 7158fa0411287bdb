"""The form of a finding, and how its numbers are put."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.watch.words import counted

Level = Literal["serious", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the data."""

    level: Level
    """`serious`: a drafter trained on these data would disappoint, or there is nothing to train on;
    `warning`: look at it; `note`: good to know."""
    title: str
    text: str
    advice: str
    anchor: str
    """The section of the page that shows it."""


def percent(part: float, whole: float) -> str:
    """Such as `12 %`, `0.4 %`, `99.9 %`: never 0 or 100 of what is not."""
    if not whole:
        return "0 %"
    value = 100 * part / whole
    if value in (0.0, 100.0) or 10 <= value <= 99:
        return f"{value:.0f} %"
    return f"{min(max(value, 0.1), 99.9):.1f} %"


def are(count: int, noun: str) -> str:
    """Such as `1 row is`, `2 rows are`."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"


def have(count: int, noun: str) -> str:
    """Such as `1 row has`, `2 rows have`."""
    return f"{counted(count, noun)} {'has' if count == 1 else 'have'}"


def some(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many there are beside."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
